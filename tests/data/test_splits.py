"""medconv/data/splits.py: folds as in nnU-Net, the dataset's own splits, groups, duplicates, rare classes."""

import json
import logging
from pathlib import Path

import pytest
from helpers.cases import ids, some_cases

from medconv.data.case import Case
from medconv.data.datasets.dataset_json import auto
from medconv.data.splits import DataSplit, drop_duplicates, grouped, split_cases, split_fold, split_patient
from medconv.utils.errors import ArgumentError

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


def case(name, value = 0, split = "", group = ""):
    return Case(name, (Path(name),), values=(value,), group=group, split=split)


def test_splits_of_the_dataset_replace_folds(caplog):
    cases = [case(str(i), split=split) for i, split in enumerate(["train"] * 4 + ["val", "test"])]
    with caplog.at_level(logging.WARNING):
        assert split_cases(cases, 0, 5) == DataSplit(cases[:4], cases[4:5], cases[5:]) and not caplog.records
        assert split_cases(cases, 3, 5) == split_cases(cases, 0, 5)
    assert "fold=3 is not used" in caplog.text
    assert split_cases(cases, "all", 5) == DataSplit(cases[:5], [], cases[5:])


def test_training_cases_are_folded_if_none_is_for_validation():
    cases = [case(str(i), split="train") for i in range(8)] + [case("8", split="test")]
    data_split = split_cases(cases, 1, 4)
    assert len(data_split.train) == 6 and len(data_split.val) == 2 and ids(data_split.test) == ["8"]


def test_folds_keep_groups_together():
    cases = [case(f"{i:02d}", group=f"p{i % 4}") for i in range(12)]
    groups = [{c.group for c in split_cases(cases, fold, 4).val} for fold in range(4)]
    assert sorted(map(len, groups)) == [1, 1, 1, 1] and set.union(*groups) == {"p0", "p1", "p2", "p3"}
    for fold in range(4):
        data_split = split_cases(cases, fold, 4)
        assert len(data_split.val) == 3 and len(data_split.train) == 9
    with pytest.raises(ValueError, match="number of groups, 4, got 5"):
        split_cases(cases, 0, 5)


def test_group_in_two_splits_is_an_error(tmp_path):
    cases = [
        case("a", split="train", group="p"),
        case("b", split="val", group="p"),
        case("c", split="train", group="q"),
    ]
    with pytest.raises(ValueError, match="group p is in more than one split: a in training, b in validation"):
        split_cases(cases, 0, 5)
    (tmp_path / "s.json").write_text('[{"train": ["a", "c"], "val": ["b"]}]')
    with pytest.raises(ValueError, match="group p is in more than one split"):
        split_cases([case(n, group="q" if n == "c" else "p") for n in "abc"], 0, 5, tmp_path / "s.json")




def test_copies_of_validation_and_test_images_are_dropped_from_training(
    caplog,
):
    data_split = DataSplit([case("a"), case("b"), case("c")], [case("v")], [case("t")])
    deduplicated = drop_duplicates(data_split, {"a": "1", "b": "2", "c": "3", "v": "2", "t": "3"})
    assert [ids(deduplicated.train), ids(deduplicated.val), ids(deduplicated.test)] == [["a"], ["v"], ["t"]]
    assert (
        "images of training cases are also in validation or test; skipped in training: b (v), c (t)"
        in caplog.text
    )
    assert drop_duplicates(data_split, {}) == data_split
    assert drop_duplicates(data_split, dict.fromkeys("abcvt", "")) == data_split  # nothing is known of them
    with pytest.raises(ValueError, match="every training image is also in validation or test"):
        drop_duplicates(data_split, dict.fromkeys("abcvt", "1"))


def two_of_each(count, first = "frame01", second = "frame12"):
    names = [f"patient{i:03d}_{part}" for i in range(count) for part in (first, second)]
    return [Case(name, (Path(name),)) for name in names]


def test_a_pattern_keeps_a_patients_cases_in_one_fold(caplog):
    cases = grouped(two_of_each(10), r"(patient\d+)")
    for fold in range(5):
        split = split_cases(cases, fold, 5)
        sides = [{case.id.partition("_")[0] for case in side} for side in (split.train, split.val)]
        assert not sides[0] & sides[1] and len(sides[1]) == 2
    assert not caplog.records
    assert grouped([Case("a-7-x", ())], r"(\w)-(\d)")[0].group == "a_7"
    assert grouped([Case("a-7-x", ())], r"\w-")[0].group == "a-"
    # alternatives, of which one has no group: each of its cases is its own
    controls = grouped([Case(name, ()) for name in ("ctrl1", "ctrl2", "p7_a")], r"(p\d)|(v\d)|ctrl\d")
    assert [case.group for case in controls] == ["ctrl1", "ctrl2", "p7_"]


def test_an_unfit_group_pattern_is_refused():
    with pytest.raises(ArgumentError, match=r"group_pattern=\(p: no regular expression, "):
        grouped(some_cases(2), "(p")
    with pytest.raises(ArgumentError, match=r"group_pattern=s\\d: finds nothing .*case_000, case_001"):
        grouped(some_cases(2), r"s\d")
    with pytest.raises(ArgumentError, match="the dataset names its groups already"):
        grouped([case("a", group="p")], "a")


def test_a_patient_that_seems_split_apart_is_found():
    """Only where ids end in a number after a patient's; its pattern keeps the patient together."""
    cases = two_of_each(10)
    patient = split_patient(split_cases(cases, 0, 5))
    assert patient is not None
    assert patient.train.partition("_")[0] == patient.val.partition("_")[0]
    assert split_patient(split_cases(grouped(cases, patient.group_pattern), 0, 5)) is None
    assert split_patient(split_cases(cases, "all", 5)) is None
    for names in (
        "case_{:03d}",
        "BraTS20_Training_{:03d}",
        "hippocampus_{:03d}",
        "1.3.6.1.{}",
        "BraTS-GLI-{:05d}-000",
    ):
        split = split_cases([Case(names.format(i), ()) for i in range(20)], 0, 5)
        assert split_patient(split) is None


@pytest.mark.parametrize(
    ("names", "group_pattern"),
    [
        (("ED_A{}S9V{}", "ES_A{}S9V{}"), "^[^_]+_([^_]+)"),
        (("patient{:03d}_ED", "patient{:03d}_ES"), "^([^_]+)"),
        (("heart-{:03d}-systole", "heart-{:03d}-diastole"), "^[^-]+-([^-]+)"),
        (("{:03d}_left_eye", "{:03d}_right_eye"), "^([^_]+)"),
    ],
)
def test_a_patient_with_an_image_of_each_kind_is_found(names, group_pattern):
    cases = [Case(name.format(i, i), ()) for name in names for i in range(20)]
    cases.pop()  # an image may be missing
    patient = split_patient(split_cases(cases, 0, 5))
    assert patient is not None
    assert patient.group_pattern == group_pattern
    split = split_cases(grouped(cases, group_pattern), 0, 5)
    assert len({case.group for case in split.val}) == 4


@pytest.mark.parametrize(
    "names",
    [
        ("benign_{:03d}", "malignant_{:03d}"),  # pictures of each kind are counted
        ("{:02d}_training",),
        ("la_{:03d}",),
        ("{:012x}",),
        ("BRATS_HGG_{:03d}", "BRATS_LGG_{:03d}"),
    ],
)
def test_images_that_are_counted_are_no_patients(names):
    cases = [Case(name.format(i), ()) for name in names for i in range(20)]
    assert split_patient(split_cases(cases, 0, 5)) is None


@pytest.mark.realdata
@pytest.mark.parametrize("dataset", ["Task04_Hippocampus", "LA2018"])
def test_real_cases_that_are_counted_are_no_patients(realdata, dataset):
    if not (realdata / dataset).is_dir():
        pytest.skip(f"{realdata / dataset} is absent")
    assert split_patient(split_cases(auto(realdata / dataset).cases, 0, 5)) is None


@pytest.mark.realdata
def test_the_two_volumes_of_a_cardiac_patient(realdata):
    cases = auto(realdata / "Dataset027_ACDC").cases
    patient = split_patient(split_cases(cases, 0, 5))
    assert patient is not None and patient.group_pattern == "(.+)_frame"
    split = split_cases(grouped(cases, r"(patient\d+)"), 0, 5)
    assert len({case.group for case in split.val}) == 10 and len(split.val) == 20


# fmt: on


@pytest.mark.parametrize("folds", [KFOLD_13, KFOLD_208], ids=["13", "208"])
def test_folds_are_those_of_nnunet(folds):
    cases = some_cases(sum(map(len, folds)))
    for fold, held_out in enumerate(folds):
        train, val = split_fold(cases[::-1], fold, 5)
        assert ids(val) == [f"case_{i:03d}" for i in held_out]
        assert ids(train) == [case.id for i, case in enumerate(cases) if i not in held_out]


@pytest.mark.realdata
def test_real_decathlon_dataset_has_the_folds_of_nnunet(realdata):
    root = realdata / "Task04_Hippocampus"
    if not root.is_dir():
        pytest.skip(f"{root} is absent")
    dataset = auto(root)
    assert dataset.class_names == ("background", "Anterior", "Posterior")
    assert all(path.is_file() for case in dataset.cases for path in case.files)
    if len(dataset.cases) == 208:
        assert ids(split_fold(dataset.cases, 0, 5)[1]) == [dataset.cases[i].id for i in KFOLD_208[0]]


def test_fold_all_trains_on_every_case():
    train, val = split_fold(some_cases(4)[::-1], "all", 5)
    assert ids(train) == ids(some_cases(4)) and val == []


@pytest.mark.parametrize("fold", [-1, 5, "-1", "first", 1.5])
def test_fold_must_be_in_range(fold):
    with pytest.raises(ValueError, match=rf"fold must be `all` or lie in 0\.\.4, got {fold}"):
        split_fold(some_cases(10), fold, 5)


def test_a_single_case_has_no_folds():
    with pytest.raises(ValueError, match=r"fold=0: a single case has no folds; fold=all trains on it"):
        split_fold(some_cases(1), 0, 5)


def test_fold_may_be_text():
    assert split_fold(some_cases(10), "3", 5) == split_fold(some_cases(10), 3, 5)


@pytest.mark.parametrize("num_folds", [0, 1, 4])
def test_number_of_folds_must_be_in_range(num_folds):
    with pytest.raises(
        ValueError,
        match=rf"num_folds must lie between 2 and .* 3, got {num_folds}; num_folds=3 validates one case a fold, and fold=all",
    ):
        split_fold(some_cases(3), 0, num_folds)


def write_splits(path, content):
    path.write_text(json.dumps(content))
    return path


def test_splits_file_replaces_the_random_folds(tmp_path):
    folds = [
        {"train": ["case_003", "case_000"], "val": ["case_001"]},
        {"train": ["case_001"], "val": ["case_002"]},
    ]
    path = write_splits(tmp_path / "splits_final.json", folds)
    train, val = split_fold(some_cases(4), 0, 5, path)
    assert (ids(train), ids(val)) == (["case_003", "case_000"], ["case_001"])
    assert ids(split_fold(some_cases(4), "1", 5, path)[0]) == ["case_001"]
    assert len(split_fold(some_cases(4), "all", 5, path)[0]) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"train": ["case_000", "gone"], "val": ["absent"]}],
            "no such cases: absent, gone; the dataset has case_000, case_001, case_002",
        ),
        ([{"train": ["case_000", "case_001"], "val": ["case_001"]}], "cases in both train and val: case_001"),
        ([{"train": None, "val": ["case_001"]}], "train of fold 0 must be a list of case ids, got None"),
        ([{"train": ["case_000"], "val": "case_001"}], "val of fold 0 must be a list of case ids"),
        ([{"train": ["case_000"], "val": []}], "val of fold 0 names no case; fold=all trains on every case"),
        ([{"train": ["case_000", 1], "val": []}], "train of fold 0 must be a list of case ids"),
        (
            [{"train": ["case_000", "case_000"], "val": ["case_001"]}],
            "train of fold 0 has cases twice: case_000",
        ),
        ([], "got 1"),
        ([{"train": [], "val": []}], r"fold must be `all` or lie in 0\.\.0, got 1"),
        ([{"train": []}], "a list of folds, each with the keys `train` and `val`"),
        ({"train": [], "val": []}, "a list of folds"),
    ],
)
def test_invalid_splits_file_is_an_error(tmp_path, content, message):
    path = write_splits(tmp_path / "splits_final.json", content)
    with pytest.raises(ValueError, match=message) as error:
        split_fold(some_cases(3), 0 if "case" in message else 1, 5, path)
    assert str(error.value).startswith(f"{path}: ")


def test_unreadable_splits_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.json: cannot be read \(No such file"):
        split_fold(some_cases(3), 0, 5, tmp_path / "gone.json")
    (tmp_path / "splits.json").write_text("[{")
    with pytest.raises(ValueError, match=r"splits\.json: not valid JSON"):
        split_fold(some_cases(3), 0, 5, tmp_path / "splits.json")


def test_cases_that_a_splits_file_leaves_out_are_named(tmp_path, caplog):
    folds = [{"train": ["case_000", "case_002"], "val": ["case_001"]}]
    path = write_splits(tmp_path / "splits_final.json", folds)
    split_fold(some_cases(3), 0, 5, path)
    assert not caplog.text
    split_fold(some_cases(5), 0, 5, path)
    assert "cases that are neither in train nor in val of fold 0: case_003, case_004" in caplog.text


def test_a_splits_file_may_have_another_unicode_form(tmp_path):
    cases = [Case("ren\u00e9", ()), Case("anna", ())]
    path = write_splits(tmp_path / "splits_final.json", [{"train": ["anna"], "val": ["rene\u0301"]}])
    assert split_fold(cases, 0, 5, path) == ([cases[1]], [cases[0]])
