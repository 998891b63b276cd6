"""medconv/data/splits.py: folds as in nnU-Net, the dataset's own splits, groups, duplicates, rare classes."""

import logging
from pathlib import Path

import pytest
from helpers.cases import ids, some_cases

from medconv.data.case import Case
from medconv.data.datasets.auto import auto
from medconv.data.splits import (
    DataSplit,
    check_examples,
    drop_duplicates,
    grouped,
    split_cases,
    split_patient,
)
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.multilabel import MultilabelTargets
from medconv.utils.errors import ArgumentError


def case(name: str, value: float = 0, split: str = "", group: str = "") -> Case:
    return Case(name, (Path(name),), values=(value,), group=group, split=split)


def test_splits_of_the_dataset_replace_folds(caplog: pytest.LogCaptureFixture) -> None:
    cases = [case(str(i), split=split) for i, split in enumerate(["train"] * 4 + ["val", "test"])]
    with caplog.at_level(logging.WARNING):
        assert split_cases(cases, 0, 5) == DataSplit(cases[:4], cases[4:5], cases[5:]) and not caplog.records
        assert split_cases(cases, 3, 5) == split_cases(cases, 0, 5)
    assert "fold=3 is not used" in caplog.text
    assert split_cases(cases, "all", 5) == DataSplit(cases[:5], [], cases[5:])


def test_training_cases_are_folded_if_none_is_for_validation() -> None:
    cases = [case(str(i), split="train") for i in range(8)] + [case("8", split="test")]
    data_split = split_cases(cases, 1, 4)
    assert len(data_split.train) == 6 and len(data_split.val) == 2 and ids(data_split.test) == ["8"]


def test_folds_keep_groups_together() -> None:
    cases = [case(f"{i:02d}", group=f"p{i % 4}") for i in range(12)]
    groups = [{c.group for c in split_cases(cases, fold, 4).val} for fold in range(4)]
    assert sorted(map(len, groups)) == [1, 1, 1, 1] and set.union(*groups) == {"p0", "p1", "p2", "p3"}
    for fold in range(4):
        data_split = split_cases(cases, fold, 4)
        assert len(data_split.val) == 3 and len(data_split.train) == 9
    with pytest.raises(ValueError, match="number of groups, 4, got 5"):
        split_cases(cases, 0, 5)


def test_group_in_two_splits_is_an_error(tmp_path: Path) -> None:
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


def test_class_without_an_example_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    image_targets = MulticlassTargets(("no", "yes"))
    check_examples(DataSplit([case("a", 0), case("b", 1)], [case("c", 0), case("d", 1)], []), image_targets)
    with pytest.raises(ValueError, match="no training case has class yes"):
        check_examples(DataSplit([case("a", 0)], [case("c", 0), case("d", 1)], []), image_targets)
    with pytest.raises(ValueError, match="no validation case has class no"):
        check_examples(DataSplit([case("a", 0), case("b", 1)], [case("d", 1)], []), image_targets)
    check_examples(DataSplit([case("a", 0), case("b", 1)], [], []), image_targets)
    findings = MultilabelTargets(("x", "y"))
    neither, both, second = (Case(str(v), (), values=v) for v in ((0.0, 0.0), (1.0, 1.0), (0.0, 1.0)))
    check_examples(DataSplit([both], [neither, second], []), findings)
    assert "no validation case has x" in caplog.text
    with pytest.raises(ValueError, match="no training case has label x"):
        check_examples(DataSplit([second], [neither, second], []), findings)
    for val in ([neither, neither], [second, second]):  # no finding has an AUC
        with pytest.raises(ValueError, match="no label has both positive and negative validation cases"):
            check_examples(DataSplit([both], val, []), findings)


def test_copies_of_validation_and_test_images_are_dropped_from_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


def two_of_each(count: int, first: str = "frame01", second: str = "frame12") -> list[Case]:
    names = [f"patient{i:03d}_{part}" for i in range(count) for part in (first, second)]
    return [Case(name, (Path(name),)) for name in names]


def test_a_pattern_keeps_a_patients_cases_in_one_fold(caplog: pytest.LogCaptureFixture) -> None:
    cases = grouped(two_of_each(10), r"(patient\d+)")
    for fold in range(5):
        split = split_cases(cases, fold, 5)
        sides = [{case.id.partition("_")[0] for case in side} for side in (split.train, split.val)]
        assert not sides[0] & sides[1] and len(sides[1]) == 2
    assert not caplog.records
    assert grouped([Case("a-7-x", ())], r"(\w)-(\d)")[0].group == "a_7"
    assert grouped([Case("a-7-x", ())], r"\w-")[0].group == "a-"


def test_an_unfit_group_pattern_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"group_pattern=\(p: no regular expression, "):
        grouped(some_cases(2), "(p")
    with pytest.raises(ArgumentError, match=r"group_pattern=s\\d: finds nothing .*case_000, case_001"):
        grouped(some_cases(2), r"s\d")
    with pytest.raises(ArgumentError, match="the dataset names its groups already"):
        grouped([case("a", group="p")], "a")


def test_a_patient_that_seems_split_apart_is_found() -> None:
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


@pytest.mark.realdata
def test_the_two_volumes_of_a_cardiac_patient(realdata: Path) -> None:
    cases = auto(realdata / "Dataset027_ACDC").cases
    patient = split_patient(split_cases(cases, 0, 5))
    assert patient is not None and patient.group_pattern == "(.+)_frame"
    split = split_cases(grouped(cases, r"(patient\d+)"), 0, 5)
    assert len({case.group for case in split.val}) == 10 and len(split.val) == 20
