"""medconv/features/image_level/medmnist.py: unpacked images, targets and class names; files that are not MedMNIST."""

import numpy as np
import pytest
from helpers.volumes import pixels

from medconv.data.io.images import read_image
from medconv.data.preprocessing.check import check
from medconv.features.image_level.medmnist import medmnist
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.multilabel import MultilabelTargets
from medconv.features.image_level.regression import RegressionTargets


def npz(path, shape=(8, 8), findings=1, **changes):
    arrays = {}
    for number, (split, count) in enumerate((("train", 6), ("val", 3), ("test", 2))):
        arrays[f"{split}_images"] = pixels(number, (count, *shape))
        arrays[f"{split}_labels"] = (
            (np.arange(count * findings) % 2).reshape(count, findings).astype(np.uint8)
        )
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


@pytest.mark.parametrize(("shape", "channels"), [((8, 8), 1), ((8, 8, 3), 3), ((8, 7, 6), 1)])
def test_images_are_unpacked_once(tmp_path, shape, channels):
    path = npz(tmp_path / "tiny.npz", shape)
    dataset = medmnist(path, tmp_path / "cache")
    assert dataset.name == "tiny" and len(dataset.modalities) == channels
    assert dataset.targets == MulticlassTargets(("0", "1"))
    assert [case.split for case in dataset.cases] == ["test"] * 2 + ["train"] * 6 + ["val"] * 3
    first = next(case for case in dataset.cases if case.id == "train_00001")
    image, original = read_image(first.images)[0], np.load(path)["train_images"][1]
    assert first.values == (1.0,)
    if len(shape) == 2:
        np.testing.assert_array_equal(image[0, :, :, 0].T, original)
    elif channels == 3:
        np.testing.assert_array_equal(image[..., 0].transpose(2, 1, 0), original)
    else:
        np.testing.assert_array_equal(image[0], original)
    assert check(dataset, 1).errors == {}
    before = first.images[0].stat().st_mtime_ns
    assert medmnist(path, tmp_path / "cache") == dataset and first.images[0].stat().st_mtime_ns == before
    assert [p.name[:5] for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"] == ["tiny-"]


def test_labels_and_the_setting_choose_the_kind_of_targets(tmp_path):
    dataset = medmnist(npz(tmp_path / "f.npz", findings=3), tmp_path / "cache")
    assert dataset.targets == MultilabelTargets(("finding_0", "finding_1", "finding_2"))
    assert [c.values for c in dataset.cases if c.split == "train"][:2] == [(0.0, 1.0, 0.0), (1.0, 0.0, 1.0)]
    path = npz(tmp_path / "c.npz", val_labels=np.full((3, 1), 4, np.uint8))
    ordinal = medmnist(path, tmp_path / "cache")
    assert ordinal.targets == MulticlassTargets(("0", "1", "2", "3", "4"))
    named = medmnist(path, tmp_path / "cache", class_names=list("abcde"))
    assert named.class_names == named.targets.names == tuple("abcde") and not named.errors
    with pytest.raises(ValueError, match=r"class_names needs a name for each of 5 outputs, got \['a'\]"):
        medmnist(path, tmp_path / "cache", class_names=["a"])
    numbers = medmnist(path, tmp_path / "cache", target_type="regression")
    assert numbers.targets == RegressionTargets(("label",))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "no.npz", r"root=.*no\.npz: no such file, expected a MedMNIST file"),
        (
            lambda p: (p / "t.npz").write_text("text") and p / "t.npz",
            r"root=.*t\.npz: not a MedMNIST file, expected \.npz",
        ),
        (lambda p: npz(p / "t.npz", val_labels=None), r"t\.npz: no array val_labels in it"),
        (
            lambda p: npz(p / "t.npz", val_labels=np.zeros((1, 1), np.uint8)),
            r"t\.npz: .*val_labels each, got",
        ),
        (
            lambda p: npz(p / "t.npz", val_labels=np.zeros((3, 1))),
            "val_labels must be whole numbers, got float64",
        ),
        (
            lambda p: npz(p / "t.npz", val_labels=np.array([[{}]] * 3, object)),
            r"t\.npz: not a MedMNIST file \(.*pickle",
        ),
    ],
)
def test_other_files_are_errors(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        medmnist(make(tmp_path), tmp_path / "cache")
    assert not any((tmp_path / "cache").glob("*/labels.csv"))
