"""medconv/data/datasets/folder.py: pairs of images and labels, pictures and masks, by patterns or folders."""

import numpy as np
import pytest
from helpers.volumes import CLASSES, image_array, label_array, pixels, save

from medconv.data.datasets.folder import folder
from medconv.data.io.raster import write_picture
from medconv.data.preprocessing.check import check


def write_pairs(root, images, labels, names):
    for i, name in enumerate(names):
        save(root / images.replace("*", name), image_array(i))
        save(root / labels.replace("*", name), label_array(i))


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        ("scans/*_t1.nii.gz", "masks/seg-*.nii.gz"),
        ("all/*.nii.gz", "all_masks/*.nii.gz"),
        ("p*/t1.nii", "p*/mask.nii"),
    ],
)
def test_wildcard_matches_the_case_id(tmp_path, images, labels):
    write_pairs(tmp_path, images, labels, "cab")
    dataset = folder(str(tmp_path / images), str(tmp_path / labels), modality="CT")
    assert [case.id for case in dataset.cases] == ["a", "b", "c"]
    assert dataset.modalities == ("CT",)
    assert dataset.class_names == ("background", "1", "2")
    assert dataset.name == tmp_path.name
    for case in dataset.cases:
        assert case.images == (tmp_path / images.replace("*", case.id),)
        assert case.label == tmp_path / labels.replace("*", case.id)


def test_relative_patterns_begin_in_the_root(tmp_path):
    write_pairs(tmp_path, "scans/*.nii.gz", "masks/*.nii.gz", "ab")
    for images, labels in (("scans/*.nii.gz", "masks/*.nii.gz"), ("scans", str(tmp_path / "masks"))):
        dataset = folder(images, labels, root=str(tmp_path))
        assert [case.images for case in dataset.cases] == [(tmp_path / f"scans/{n}.nii.gz",) for n in "ab"]
    with pytest.raises(ValueError, match=r"^root=.*/absent: no such folder$"):
        folder(str(tmp_path / "scans"), str(tmp_path / "masks"), root=str(tmp_path / "absent"))


def test_each_case_may_have_its_own_folder(tmp_path):
    """Two wildcards that match the same text give one name."""
    for name in ("a", "b"):
        save(tmp_path / name / f"{name}_t1.nii.gz", image_array(0))
        save(tmp_path / name / f"{name}_seg.nii.gz", label_array(0))
    dataset = folder(str(tmp_path / "*/*_t1.nii.gz"), str(tmp_path / "*/*_seg.nii.gz"))
    assert [case.id for case in dataset.cases] == ["a", "b"]


def test_first_readable_image_sets_the_number_of_channels(tmp_path):
    write_pairs(tmp_path, "i/*.nii.gz", "l/*.nii.gz", "abc")
    (tmp_path / "i/a.nii.gz").write_text("not an image")
    for name in "bc":
        save(tmp_path / f"i/{name}.nii.gz", np.stack([image_array(0), image_array(1)], axis=-1))
    dataset = folder(str(tmp_path / "i/*.nii.gz"), str(tmp_path / "l/*.nii.gz"), modality="CT")
    assert dataset.modalities == ("CT", "CT")
    with pytest.raises(ValueError, match="1 error in 3 cases\n  case a: "):
        check(dataset, workers=1)


def test_class_names_may_be_given(tmp_path):
    write_pairs(tmp_path, "i/*.nii.gz", "l/*.nii.gz", "a")
    assert folder(str(tmp_path / "i/*.nii.gz"), str(tmp_path / "l/*.nii.gz"), CLASSES).class_names == CLASSES


def test_cases_without_image_or_label_are_named(tmp_path):
    write_pairs(tmp_path, "i/*.nii.gz", "l/*.nii.gz", "abcd")
    (tmp_path / "i/b.nii.gz").unlink()
    (tmp_path / "l/d.nii.gz").unlink()
    images, labels = str(tmp_path / "i/*.nii.gz"), str(tmp_path / "l/*.nii.gz")
    dataset = folder(images, labels)
    assert [case.id for case in dataset.cases] == ["a", "b", "c", "d"]
    assert dataset.errors == {
        "b": f"{tmp_path / 'l/b.nii.gz'}: no image matches {images}",
        "d": f"{tmp_path / 'i/d.nii.gz'}: no label matches {labels}",
    }
    for case in "ac":
        (tmp_path / f"i/{case}.nii.gz").unlink()
    with pytest.raises(
        ValueError,
        match=r"no case has both an image and a label; ids are d in images, a, b, c in labels; write",
    ):
        folder(images, labels)


def test_classes_are_counted_in_the_readable_labels(tmp_path):
    write_pairs(tmp_path, "i/*.nii.gz", "l/*.nii.gz", "abc")
    patterns = str(tmp_path / "i/*.nii.gz"), str(tmp_path / "l/*.nii.gz")
    names = folder(*patterns).class_names
    (tmp_path / "l/a.nii.gz").write_bytes(b"")
    assert folder(*patterns).class_names == names
    for case in "bc":
        (tmp_path / f"l/{case}.nii.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"class_names is not set, and no label tells .*the file is empty"):
        folder(*patterns)


def test_invalid_patterns_are_errors(tmp_path):
    write_pairs(tmp_path, "i/*.nii.gz", "l/*.nii.gz", "a")
    good = str(tmp_path / "l/*.nii.gz")
    for images, labels in ((None, good), (good, None), ("", "")):
        with pytest.raises(ValueError, match=r"needs both images and labels"):
            folder(images, labels)
    with pytest.raises(ValueError, match=r"images=.*/i/a\.nii\.gz: needs \{id\} or a `\*`"):
        folder(str(tmp_path / "i/a.nii.gz"), good)
    with pytest.raises(ValueError, match=r"^labels=.*/absent: no such folder$"):
        folder(good, str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"labels=.*: `\*\*` is not supported"):
        folder(good, str(tmp_path / "**/*.nii.gz"))
    with pytest.raises(ValueError, match=r"labels=.*/none/\*\.nii\.gz: no file matches"):
        folder(good, str(tmp_path / "none/*.nii.gz"))


def test_two_files_of_one_case_are_an_error(tmp_path):
    for name in ("a_b/c", "a/b_c"):
        save(tmp_path / f"i/{name}.nii.gz", image_array(0))
    with pytest.raises(ValueError, match=r"a/b_c\.nii\.gz and .*a_b/c\.nii\.gz would both be case a_b_c"):
        folder(str(tmp_path / "i/*/*.nii.gz"), str(tmp_path / "i/*/*.nii.gz"))


def test_an_id_that_is_too_long_for_what_is_named_after_it_is_an_error_of_its_case(tmp_path):
    write_pairs(tmp_path, "i/*.nii.gz", "l/*.nii.gz", ["a", "b" * 220])
    dataset = folder(str(tmp_path / "i"), str(tmp_path / "l"))
    ((case, error),) = dataset.errors.items()
    assert case == "b" * 220 and "a case id names a file, of at most 200 bytes, and cannot be" in error


def test_the_background_has_a_name_too(tmp_path):
    write_pairs(tmp_path, "i/*.nii.gz", "l/*.nii.gz", "a")
    with pytest.raises(ValueError, match=r"class_names=\['nucleus'\]: the first name is the background's"):
        folder(str(tmp_path / "i/*.nii.gz"), str(tmp_path / "l/*.nii.gz"), ["nucleus"])


def test_masks_of_0_and_255_are_an_error_without_class_names(tmp_path):
    save(tmp_path / "i/a.nii.gz", image_array(0))
    save(tmp_path / "l/a.nii.gz", (label_array(0) > 0).astype(np.uint8) * 255)
    with pytest.raises(
        ValueError, match=r"labels: they hold \[0, 255\], expected 0, 1, 2, \.\.\. .* class_names"
    ):
        folder(f"{tmp_path}/i/*.nii.gz", f"{tmp_path}/l/*.nii.gz")


def test_a_value_for_each_object_is_no_class_without_a_name(tmp_path):
    for folder_name, values in (("images", np.zeros((9, 9))), ("masks", np.arange(81).reshape(9, 9))):
        (tmp_path / folder_name).mkdir()
        flat = values.repeat(3, 0).repeat(3, 1).astype(np.uint8)
        write_picture(tmp_path / folder_name / "a.png", flat)
    with pytest.raises(ValueError, match=r"^labels: they hold 81 values, .* data=instances"):
        folder(str(tmp_path / "images"), str(tmp_path / "masks"))
    names = ["background", *map(str, range(1, 81))]
    assert len(folder(str(tmp_path / "images"), str(tmp_path / "masks"), names).class_names) == 81


def test_folder_name_may_contain_brackets(tmp_path):
    for name in ("br[1]/i", "br[1]/l"):
        save(tmp_path / name / "a.nii.gz", label_array(0))
    dataset = folder(f"{tmp_path}/br[1]/i/*.nii.gz", f"{tmp_path}/br[1]/l/*.nii.gz")
    assert [case.id for case in dataset.cases] == ["a"]


def test_the_channels_of_pictures_are_their_colours(tmp_path):
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for name in "ba":
        write_picture(tmp_path / f"images/{name}.png", pixels(0, (8, 9, 3)))
        write_picture(tmp_path / f"masks/{name}_mask.png", pixels(1) // 128)
    dataset = folder(f"{tmp_path}/images/*.png", f"{tmp_path}/masks/*_mask.png", ["skin", "mole"])
    assert [case.id for case in dataset.cases] == ["a", "b"]
    assert dataset.cases[0].label == tmp_path / "masks/a_mask.png"
    assert dataset.modalities == ("red", "green", "blue")
    assert dataset.class_names == ("skin", "mole")
    assert dataset.targets.per_voxel and not dataset.errors


def test_a_pattern_for_each_channel(tmp_path):
    """The names are the modalities; a case without one of them is named."""
    for name in ("p_1", "p_2"):
        save(tmp_path / f"s/{name}/20190{name[-1]}_flair.nii.gz", image_array(0))
        save(tmp_path / f"m/{name}-seg.nii.gz", label_array(0))
    save(tmp_path / "s/p_1/x_t1.nii.gz", image_array(1))
    images = {"CT": f"{tmp_path}/s/{{id}}/*_t1.nii.gz", "flair": f"{tmp_path}/s/{{id}}/*_flair.nii.gz"}
    dataset = folder(images, f"{tmp_path}/m/{{id}}-seg.nii.gz")
    assert dataset.modalities == ("CT", "flair") and dataset.name == tmp_path.name
    assert [path.name for path in dataset.cases[0].images] == ["x_t1.nii.gz", "201901_flair.nii.gz"]
    expected = f"{tmp_path}/m/p_2-seg.nii.gz: no image matches {images['CT']}"
    assert dataset.errors == {"p_2": expected}
    with pytest.raises(ValueError, match=r"modality=CT: the names in images"):
        folder(images, f"{tmp_path}/m/{{id}}-seg.nii.gz", modality="CT")
    with pytest.raises(ValueError, match=r"images=\['a', 'b'\]: expected a pattern, or one for each"):
        folder(["a", "b"], "m")
    with pytest.raises(ValueError, match=r"images\.t1=.*: no file matches"):
        folder({"t1": f"{tmp_path}/none/*.nii"}, f"{tmp_path}/m/{{id}}-seg.nii.gz")
