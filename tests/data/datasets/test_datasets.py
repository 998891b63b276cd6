"""medconv/data/datasets/common.py: folders to cases, what is wrong with a dataset.json in words, and the
split into folds.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.volumes import (
    CLASSES,
    SHAPE,
    edit_json,
    image_array,
    label_array,
    save,
    write_json,
    write_msd,
    write_nnunet,
)

from medconv.data.case import Case, Dataset
from medconv.data.datasets.auto import auto
from medconv.data.datasets.common import class_names_of
from medconv.data.datasets.decathlon import msd
from medconv.data.datasets.folder import folder
from medconv.data.datasets.nnunet import group_channels, nnunet
from medconv.data.datasets.phantom import phantom
from medconv.data.preprocessing.fingerprint import check
from medconv.data.splits import split_fold

# The validation indices of `sklearn.model_selection.KFold(5, shuffle=True,
# random_state=12345).split(range(n))`, which is what nnU-Net uses, as scikit-learn 1.9.1 gave them.
# Regenerate with   [val.tolist() for _, val in KFold(5, shuffle=True, random_state=12345).split(range(n))]
KFOLD_13 = [[0, 7, 9], [3, 6, 10], [8, 11, 12], [1, 4], [2, 5]]
# fmt: off
KFOLD_208 = [
    [14, 16, 17, 19, 20, 27, 30, 33, 47, 49, 52, 54, 56, 67, 68, 70, 78, 89, 92, 94, 99, 103, 110, 116, 132, 141, 147,
     148, 151, 152, 159, 175, 177, 178, 179, 180, 188, 192, 194, 202, 203, 205],
    [2, 10, 24, 26, 35, 40, 42, 44, 48, 50, 51, 55, 57, 61, 66, 73, 85, 93, 98, 106, 109, 111, 120, 121, 122, 135, 137,
     140, 144, 146, 149, 153, 157, 163, 171, 172, 181, 182, 186, 190, 197, 199],
    [4, 8, 9, 13, 15, 18, 25, 28, 39, 45, 60, 65, 69, 71, 79, 84, 90, 95, 96, 100, 102, 104, 112, 117, 125, 127, 128,
     130, 134, 136, 139, 150, 154, 156, 161, 162, 165, 170, 176, 189, 191, 206],
    [0, 3, 5, 6, 12, 21, 22, 32, 37, 38, 41, 46, 53, 58, 62, 63, 72, 74, 76, 80, 82, 83, 86, 88, 107, 108, 123, 145,
     155, 158, 160, 167, 168, 173, 174, 183, 184, 185, 196, 201, 204],
    [1, 7, 11, 23, 29, 31, 34, 36, 43, 59, 64, 75, 77, 81, 87, 91, 97, 101, 105, 113, 114, 115, 118, 119, 124, 126, 129,
     131, 133, 138, 142, 143, 164, 166, 169, 187, 193, 195, 198, 200, 207],
]
# fmt: on


def ids(cases: Any) -> list[str]:
    return [case.id for case in cases]


def some_cases(count: int) -> list[Case]:
    return [Case(f"case_{i:03d}", (Path(f"case_{i:03d}.nii.gz"),)) for i in range(count)]


def test_decathlon(tmp_path: Path) -> None:
    dataset = msd(write_msd(tmp_path / "Task", 12))
    assert (dataset.name, dataset.class_names, dataset.modalities) == ("Tiny", CLASSES, ("MRI",))
    assert ids(dataset.cases) == sorted(f"case_{i}" for i in range(12))
    for case in dataset.cases:
        assert case.images == (tmp_path / f"Task/imagesTr/{case.id}.nii.gz",)
        assert case.label == tmp_path / f"Task/labelsTr/{case.id}.nii.gz"
        assert all(path.is_file() for path in case.files)


def test_nnunet(tmp_path: Path) -> None:
    dataset = nnunet(write_nnunet(tmp_path / "Dataset007_Tiny"))
    assert (dataset.name, dataset.class_names, dataset.modalities) == (
        "Dataset007_Tiny",
        CLASSES,
        ("T1", "FLAIR"),
    )
    assert ids(dataset.cases) == ["case_0", "case_1", "case_2"]
    for case in dataset.cases:
        assert [path.name for path in case.images] == [f"{case.id}_0000.nii.gz", f"{case.id}_0001.nii.gz"]
        assert case.label == tmp_path / f"Dataset007_Tiny/labelsTr/{case.id}.nii.gz"
        assert all(path.is_file() for path in case.files)


def test_nnunet_of_uncompressed_files(tmp_path: Path) -> None:
    root = edit_json(write_nnunet(tmp_path), file_ending=".nii", channel_names={"0": "T1"})
    save(root / "imagesTr/other_0000.nii", image_array(0))
    save(root / "labelsTr/other.nii", label_array(0))
    (case,) = nnunet(root).cases
    assert [path.name for path in case.files] == ["other_0000.nii", "other.nii"]


def test_nnunet_leaves_hidden_files_alone(tmp_path: Path) -> None:
    """Archives packed on a Mac hold a `._NAME` beside each file."""
    root = write_nnunet(tmp_path, 2)
    (root / "imagesTr/._case_0_0000.nii.gz").write_bytes(b"\0\5\x16\7")
    assert ids(nnunet(root).cases) == ["case_0", "case_1"]


def test_auto_tells_the_two_apart(tmp_path: Path) -> None:
    assert auto(write_msd(tmp_path / "msd")) == msd(tmp_path / "msd")
    assert auto(write_nnunet(tmp_path / "nnunet")) == nnunet(tmp_path / "nnunet")


def test_auto_says_what_it_looked_for(tmp_path: Path) -> None:
    message = (
        r"dataset\.json: neither a Decathlon .*`modality`, `training`.*nor.*`channel_names`.*it "
        r"has \['name', 'tasks'\]"
    )
    with pytest.raises(ValueError, match=message):
        auto(write_json(tmp_path, {"name": "x", "tasks": []}))


@pytest.mark.parametrize("missing", ["case_1_0000.nii.gz", "case_1_0001.nii.gz"])
def test_nnunet_missing_channel_is_named(tmp_path: Path, missing: str) -> None:
    root = write_nnunet(tmp_path)
    (root / "imagesTr" / missing).unlink()
    has = 1 - int(missing[-8])
    dataset = nnunet(root)  # a fault of one case, which `check` lists with all others
    assert [case.id for case in dataset.cases] == ["case_0", "case_1", "case_2"]
    expected = f"{root / 'imagesTr'}: expected channels 0 to 1 of every case, found [{has}]"
    assert dataset.errors == {"case_1": expected}


def test_group_channels_names_every_wrong_case() -> None:
    names = ["a_0000", "a_0001", "b_0000", "c_0000", "c_0001", "c_0002"]
    with pytest.raises(ValueError, match=r"0 to 1: b has \[0\]; c has \[0, 1, 2\]"):
        group_channels([Path(f"x/{name}.nii.gz") for name in names], 2)
    with pytest.raises(ValueError, match=r"x/a_1\.nii\.gz: .*channel number.*CASE_0000"):
        group_channels([Path("x/a_1.nii.gz")], 1)


def test_channels_come_in_their_order() -> None:
    files = [Path(f"a_{channel:04d}.nii.gz") for channel in (2, 0, 1)]
    assert group_channels(files, 3) == {"a": tuple(sorted(files))}


REGIONS = {"background": 0, "whole": [1, 2], "core": 2}
BOTH: list[tuple[Callable[[Path], Path], Callable[[Path], Dataset]]] = [
    (write_msd, msd),
    (write_nnunet, nnunet),
]
BAD_JSON: dict[str, tuple[int, dict[str, Any], str]] = {
    "msd: no training": (0, {"training": None}, "`training` must list at least one case, got None"),
    "msd: empty training": (0, {"training": []}, r"`training` must list at least one case, got \[\]"),
    "msd: entry without label": (
        0,
        {"training": [{"image": "a.nii.gz"}]},
        "needs the keys `image` and `label`",
    ),
    "msd: no modality": (0, {"modality": None}, "`modality` must map channel numbers to names"),
    "msd: gap in modalities": (0, {"modality": {"0": "a", "2": "b"}}, "`modality` must map.*got.*'2': 'b'"),
    "msd: no labels": (
        0,
        {"labels": None},
        "`labels` must name the background and at least one class, got None",
    ),
    "msd: background only": (
        0,
        {"labels": {"0": "background"}},
        "`labels` must name the background and at least one",
    ),
    "msd: gap in labels": (
        0,
        {"labels": {"0": "background", "1": "a", "3": "b"}},
        r"without a gap.*got \[0, 1, 3\]",
    ),
    "msd: equal names": (
        0,
        {"labels": {"0": "background", "1": "a", "2": "a"}},
        "name of its own, got.*'a', 'a'",
    ),
    "nnunet: no channels": (1, {"channel_names": None}, "`channel_names` must map channel numbers"),
    "nnunet: no labels": (1, {"labels": None}, "`labels` must name the background"),
    "nnunet: gap in labels": (1, {"labels": {"background": 0, "a": 2}}, r"without a gap.*got \[0, 2\]"),
    "nnunet: equal values": (1, {"labels": {"background": 0, "a": 1, "b": 1}}, r"each once, got \[0, 1, 1\]"),
    "nnunet: regions without an order": (
        1,
        {"labels": REGIONS},
        r"need the key `regions_class_order`.*\['whole', 'core'\]",
    ),
    "nnunet: a wrong order": (
        1,
        {"labels": REGIONS, "regions_class_order": [2, 2]},
        r"regions_class_order must give.*\[2, 2\]",
    ),
    "nnunet: ignore within": (
        1,
        {"labels": {"background": 0, "ignore": 1, "a": 2}},
        r"without a gap.*got \[0, 2\]",
    ),
    "nnunet: ignore alone": (
        1,
        {"labels": {"background": 0, "ignore": 1}},
        "`ignore` must be above all classes",
    ),
    "nnunet: no values": (
        1,
        {"labels": {"background": 0, "a": []}},
        r"or for a region a list of them, got \{'a': \[\]\}",
    ),
    "nnunet: words": (1, {"labels": {"background": 0, "a": "one"}}, r"a list of them, got \{'a': 'one'\}"),
    "nnunet: file ending": (1, {"file_ending": ".png"}, r"file_ending must be one of .*, got '\.png'"),
}


@pytest.mark.parametrize("fault", BAD_JSON)
def test_bad_dataset_json(tmp_path: Path, fault: str) -> None:
    which, changes, message = BAD_JSON[fault]
    write, read = BOTH[which]
    root = edit_json(write(tmp_path), **changes)
    with pytest.raises(ValueError, match=message) as error:
        read(root)
    assert str(error.value).startswith(f"{root / 'dataset.json'}: ")


@pytest.mark.parametrize("read", [auto, msd, nnunet, class_names_of])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1, 2]", "expected a JSON object, got list"),
    ],
)
def test_dataset_json_that_is_none(
    tmp_path: Path, read: Callable[[Path], Any], content: bytes, message: str
) -> None:
    (tmp_path / "dataset.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'dataset.json'}: ")


@pytest.mark.parametrize("read", [auto, msd, nnunet])
def test_root_that_is_none(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    for unset in (None, ""):
        with pytest.raises(ValueError, match=r"data\.root is not set.*folder that holds dataset\.json"):
            read(unset)
    with pytest.raises(ValueError, match=rf"data\.root={tmp_path}/gone: no such folder"):
        read(tmp_path / "gone")
    with pytest.raises(ValueError, match=rf"{tmp_path}: no dataset\.json there; the folder holds nothing"):
        read(tmp_path)
    (tmp_path / "imagesTr").mkdir()
    with pytest.raises(ValueError, match=r"no dataset\.json there; the folder holds imagesTr"):
        read(str(tmp_path))


def test_nnunet_without_images(tmp_path: Path) -> None:
    root = write_nnunet(tmp_path, 0)
    with pytest.raises(ValueError, match=rf"{root}/imagesTr: no \*\.nii\.gz file there.*CASE_0000\.nii\.gz"):
        nnunet(root)


def test_case_ids_that_occur_twice_are_named(tmp_path: Path) -> None:
    entries = [
        {"image": f"{d}/{n}.nii.gz", "label": f"l/{n}.nii.gz"} for d, n in ("ax", "bx", "ay", "az", "bz")
    ]
    root = edit_json(write_msd(tmp_path, 1), training=entries)
    with pytest.raises(ValueError, match=r"dataset\.json: case ids that occur more than once: x, z$"):
        msd(root)


def write_pairs(root: Path, images: str, labels: str, names: str) -> None:
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
def test_folder_takes_the_wildcard_as_the_case(tmp_path: Path, images: str, labels: str) -> None:
    write_pairs(tmp_path, images, labels, "cab")
    dataset = folder(str(tmp_path / images), str(tmp_path / labels), modality="CT")
    assert ids(dataset.cases) == ["a", "b", "c"]
    assert dataset.modalities == ("CT",)
    assert dataset.class_names == ("background", "1", "2")
    assert dataset.name == {"s": "scans", "a": "all", "p": tmp_path.name}[images[0]]
    for case in dataset.cases:
        assert case.images == (tmp_path / images.replace("*", case.id),)
        assert case.label == tmp_path / labels.replace("*", case.id)


def test_folder_of_a_folder_per_case(tmp_path: Path) -> None:
    """Two wildcards that say the same are one name."""
    for name in ("a", "b"):
        save(tmp_path / name / f"{name}_t1.nii.gz", image_array(0))
        save(tmp_path / name / f"{name}_seg.nii.gz", label_array(0))
    dataset = folder(str(tmp_path / "*/*_t1.nii.gz"), str(tmp_path / "*/*_seg.nii.gz"))
    assert ids(dataset.cases) == ["a", "b"]


def test_folder_has_as_many_channels_as_its_first_image(tmp_path: Path) -> None:
    write_pairs(tmp_path, "i/*.nii.gz", "l/*.nii.gz", "abc")
    (tmp_path / "i/a.nii.gz").write_text("not an image")
    for name in "bc":
        save(tmp_path / f"i/{name}.nii.gz", np.stack([image_array(0), image_array(1)], axis=-1))
    dataset = folder(str(tmp_path / "i/*.nii.gz"), str(tmp_path / "l/*.nii.gz"), modality="CT")
    assert dataset.modalities == ("CT", "CT")
    with pytest.raises(ValueError, match="1 errors in 3 cases\n  case a: "):
        check(dataset, workers=1)


def test_folder_takes_class_names(tmp_path: Path) -> None:
    write_pairs(tmp_path, "i/*.nii.gz", "l/*.nii.gz", "a")
    assert folder(str(tmp_path / "i/*.nii.gz"), str(tmp_path / "l/*.nii.gz"), CLASSES).class_names == CLASSES


def test_folder_names_cases_without_a_partner(tmp_path: Path) -> None:
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
        match=r"no case has both an image and a label; the `\*` matches d in images, a, b, c",
    ):
        folder(images, labels)


def test_folder_counts_classes_in_the_labels_that_can_be_read(tmp_path: Path) -> None:
    write_pairs(tmp_path, "i/*.nii.gz", "l/*.nii.gz", "abc")
    patterns = str(tmp_path / "i/*.nii.gz"), str(tmp_path / "l/*.nii.gz")
    whole = folder(*patterns).class_names
    (tmp_path / "l/a.nii.gz").write_bytes(b"")
    assert folder(*patterns).class_names == whole
    for case in "bc":
        (tmp_path / f"l/{case}.nii.gz").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"data\.class_names is not set, and no label tells .*the file is empty"
    ):
        folder(*patterns)


def test_folder_says_what_is_wrong_with_its_patterns(tmp_path: Path) -> None:
    write_pairs(tmp_path, "i/*.nii.gz", "l/*.nii.gz", "a")
    good = str(tmp_path / "l/*.nii.gz")
    for images, labels in ((None, good), (good, None), ("", "")):
        with pytest.raises(ValueError, match=r"needs both data\.images and data\.labels"):
            folder(images, labels)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"data\.images=.*/i/a\.nii\.gz: needs a `\*`"):
        folder(str(tmp_path / "i/a.nii.gz"), good)
    with pytest.raises(ValueError, match=r"data\.labels=.*: `\*\*` is not supported"):
        folder(good, str(tmp_path / "**/*.nii.gz"))
    with pytest.raises(ValueError, match=r"data\.labels=.*/none/\*\.nii\.gz: no file matches"):
        folder(good, str(tmp_path / "none/*.nii.gz"))


def test_folder_refuses_two_files_for_one_case(tmp_path: Path) -> None:
    for name in ("a_b/c", "a/b_c"):
        save(tmp_path / f"i/{name}.nii.gz", image_array(0))
    with pytest.raises(ValueError, match=r"a/b_c\.nii\.gz and .*a_b/c\.nii\.gz would both be case a_b_c"):
        folder(str(tmp_path / "i/*/*.nii.gz"), str(tmp_path / "i/*/*.nii.gz"))


def test_phantom_is_written_where_it_is_not(tmp_path: Path) -> None:
    dataset = phantom(tmp_path / "phantom", spatial_dims=2, num_cases=2)
    assert len(dataset.cases) == 2 and all(path.is_file() for case in dataset.cases for path in case.files)
    assert dataset.class_names[0] == "background"


@pytest.mark.parametrize("folds", [KFOLD_13, KFOLD_208], ids=["13", "208"])
def test_split_is_that_of_nnunet(folds: list[list[int]]) -> None:
    cases = some_cases(sum(map(len, folds)))
    for fold, held_out in enumerate(folds):
        train, val = split_fold(cases[::-1], fold, 5)
        assert ids(val) == [f"case_{i:03d}" for i in held_out]
        assert ids(train) == [case.id for i, case in enumerate(cases) if i not in held_out]


@pytest.mark.parametrize(("count", "num_folds"), [(13, 5), (10, 3), (5, 5), (2, 2)])
def test_folds_hold_each_case_once(count: int, num_folds: int) -> None:
    cases = some_cases(count)
    parts = [split_fold(cases, fold, num_folds) for fold in range(num_folds)]
    assert sorted(c for _, val in parts for c in ids(val)) == ids(cases)
    sizes = [len(val) for _, val in parts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    for train, val in parts:
        assert not set(ids(train)) & set(ids(val))
        assert len(train) + len(val) == count


def test_fold_all_trains_on_every_case() -> None:
    train, val = split_fold(some_cases(4)[::-1], "all", 5)
    assert ids(train) == ids(some_cases(4)) and val == []


@pytest.mark.parametrize("fold", [-1, 5, "-1", "first", 1.5])
def test_fold_out_of_range(fold: Any) -> None:
    with pytest.raises(ValueError, match=rf"data\.fold must be `all` or lie in 0\.\.4, got {fold}"):
        split_fold(some_cases(10), fold, 5)


def test_fold_as_text_is_a_number() -> None:
    assert split_fold(some_cases(10), "3", 5) == split_fold(some_cases(10), 3, 5)


@pytest.mark.parametrize("num_folds", [0, 1, 4])
def test_number_of_folds_out_of_range(num_folds: int) -> None:
    with pytest.raises(ValueError, match=rf"data\.num_folds must lie between 2 and .* 3, got {num_folds}"):
        split_fold(some_cases(3), 0, num_folds)


def write_splits(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_splits_file_takes_the_place_of_the_rule(tmp_path: Path) -> None:
    folds = [{"train": ["case_003", "case_000"], "val": ["case_001"]}, {"train": ["case_001"], "val": []}]
    path = write_splits(tmp_path / "splits_final.json", folds)
    train, val = split_fold(some_cases(4), 0, 5, path)
    assert (ids(train), ids(val)) == (["case_003", "case_000"], ["case_001"])
    assert ids(split_fold(some_cases(4), "1", 5, path)[0]) == ["case_001"]
    assert len(split_fold(some_cases(4), "all", 5, path)[0]) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"train": ["case_000", "who"], "val": ["what"]}], r"unknown cases \['what', 'who'\]"),
        (
            [{"train": ["case_000", "case_001"], "val": ["case_001"]}],
            r"cases in both train and val \['case_001'\]",
        ),
        ([], "got 1"),
        ([{"train": [], "val": []}], r"data\.fold must be `all` or lie in 0\.\.0, got 1"),
        ([{"train": []}], "a list of folds, each with the keys `train` and `val`"),
        ({"train": [], "val": []}, "a list of folds"),
    ],
)
def test_splits_file_at_fault(tmp_path: Path, content: Any, message: str) -> None:
    path = write_splits(tmp_path / "splits_final.json", content)
    with pytest.raises(ValueError, match=message) as error:
        split_fold(some_cases(3), 0 if "case" in message else 1, 5, path)
    assert str(error.value).startswith(f"{path}: ")


def test_splits_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.json: cannot be read \(No such file"):
        split_fold(some_cases(3), 0, 5, tmp_path / "gone.json")
    (tmp_path / "splits.json").write_text("[{")
    with pytest.raises(ValueError, match=r"splits\.json: not valid JSON"):
        split_fold(some_cases(3), 0, 5, tmp_path / "splits.json")


def test_class_names_of_both_layouts(tmp_path: Path) -> None:
    assert (
        class_names_of(write_msd(tmp_path / "a", 1))
        == class_names_of(write_nnunet(tmp_path / "b", 1))
        == CLASSES
    )


@pytest.mark.realdata
def test_real_decathlon_dataset(realdata: Path) -> None:
    root = realdata / "Task04_Hippocampus"
    if not root.is_dir():
        pytest.skip(f"{root} is absent")
    dataset = auto(root)
    assert dataset.class_names == ("background", "Anterior", "Posterior")
    assert all(path.is_file() for case in dataset.cases for path in case.files)
    if len(dataset.cases) == 208:
        assert ids(split_fold(dataset.cases, 0, 5)[1]) == [dataset.cases[i].id for i in KFOLD_208[0]]


def test_shape_of_the_makers() -> None:
    """The boxes fit, or other tests would test nothing."""
    assert set(label_array(0).ravel()) == {0, 1, 2} and image_array(0).shape == SHAPE


def test_masks_of_0_and_255_are_refused_where_classes_are_counted(tmp_path: Path) -> None:
    save(tmp_path / "i/a.nii.gz", image_array(0))
    save(tmp_path / "l/a.nii.gz", (label_array(0) > 0).astype(np.uint8) * 255)
    with pytest.raises(
        ValueError, match=r"labels hold \[0, 255\], expected 0, 1, 2, \.\.\. .* data\.class_names"
    ):
        folder(f"{tmp_path}/i/*.nii.gz", f"{tmp_path}/l/*.nii.gz")


def test_a_folder_may_have_brackets_in_its_name(tmp_path: Path) -> None:
    for name in ("br[1]/i", "br[1]/l"):
        save(tmp_path / name / "a.nii.gz", label_array(0))
    found = folder(f"{tmp_path}/br[1]/i/*.nii.gz", f"{tmp_path}/br[1]/l/*.nii.gz")
    assert [case.id for case in found.cases] == ["a"]
