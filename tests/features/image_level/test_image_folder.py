"""medconv/features/image_level/image_folder.py: a folder per class, with or without folders for splits above."""

import pytest
from helpers.volumes import pixels

from medconv.data.io.raster import write_picture
from medconv.features.image_level.image_folder import imagefolder
from medconv.features.image_level.multiclass import MulticlassTargets


def class_folder(root, *names, shape=(8, 9)):
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_picture(root / name, pixels(i, shape))


def test_folder_names_are_classes(tmp_path):
    class_folder(tmp_path, "sick/1.png", "sick/2.jpg", "healthy/1.png", shape=(8, 9, 3))
    (tmp_path / "sick/notes.txt").write_text("not an image")
    dataset = imagefolder(tmp_path)
    assert dataset.targets == MulticlassTargets(("healthy", "sick"))
    assert dataset.modalities == ("red", "green", "blue")
    values = {case.id: case.values for case in dataset.cases}
    assert values == {"healthy_1": (0.0,), "sick_1": (1.0,), "sick_2": (1.0,)}
    assert imagefolder(tmp_path, ["sick", "healthy"]).cases[0].values == (1.0,)
    with pytest.raises(ValueError, match=r"healthy: its name is not a class; class_names has sick, ill"):
        imagefolder(tmp_path, ["sick", "ill"])
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="other: no image there .* expected those of class other"):
        imagefolder(tmp_path)


def test_folders_above_the_classes_are_splits(tmp_path, caplog):
    class_folder(tmp_path, "train/a/1.png", "train/b/2.png", "valid/a/3.png", "test/b/4.png")
    dataset = imagefolder(tmp_path)
    assert [(case.id, case.split, case.values) for case in dataset.cases] == [
        ("1", "train", (0.0,)),
        ("2", "train", (1.0,)),
        ("3", "val", (0.0,)),
        ("4", "test", (1.0,)),
    ]
    assert not caplog.text
    (tmp_path / "dev").mkdir()
    imagefolder(tmp_path)
    assert "folders that are not read: dev; splits are train, training, val" in caplog.text
    (tmp_path / "flat").mkdir()
    with pytest.raises(ValueError, match="expected a folder for each of two classes or more, found none"):
        imagefolder(tmp_path / "flat")


def test_what_is_not_read_is_named(tmp_path, caplog):
    class_folder(tmp_path, "sick/patient7/1.png", "sick/2.png", "healthy/3.png", "sick/.cache/3.png")
    assert [case.id for case in imagefolder(tmp_path).cases] == ["2", "3"]
    assert "sick: images in folders below it are not read: patient7" in caplog.text
    (tmp_path / "sick/2.png").rename(tmp_path / "sick/2.Png")
    with pytest.raises(ValueError, match=r"sick: endings must be in small letters, rename 2\.Png"):
        imagefolder(tmp_path)


def test_a_class_in_two_spellings_is_an_error(tmp_path):
    class_folder(tmp_path, "train/Sick/1.png", "train/healthy/2.png", "val/sick/3.png")
    with pytest.raises(
        ValueError, match=r"root=.*: classes that differ in .*: Sick and sick; rename a folder"
    ):
        imagefolder(tmp_path)
    assert len(imagefolder(tmp_path, ["Sick", "healthy", "sick"]).cases) == 3


def test_missing_root_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"root is not set"):
        imagefolder(None)
    with pytest.raises(ValueError, match=r"root=.*nowhere"):
        imagefolder(tmp_path / "nowhere")
