"""medconv/data/preprocessing/examined.py: only new and changed files are read again."""

import os
from dataclasses import fields, replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny

from medconv.data.case import Case, Dataset
from medconv.data.datasets.decathlon import msd
from medconv.data.preprocessing import examined
from medconv.data.preprocessing.examine import CaseReport, examine
from medconv.data.preprocessing.examined import Examined

FILE = "examined.jsonl"


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return msd(tiny.write_dataset(tmp_path / "data"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cases whose files were read."""
    names: list[str] = []

    def noted(case: Case, dataset: Dataset) -> CaseReport:
        names.append(case.id)
        return examine(case, dataset)

    monkeypatch.setattr(examined, "examine", noted)
    return names


def examine_all(dataset: Dataset, folder: Path) -> list[CaseReport]:
    memory = Examined(dataset, folder)
    return [memory.examine(case) for case in dataset.cases]


def assert_same(reports: list[CaseReport], expected: list[CaseReport]) -> None:
    for report, other in zip(reports, expected, strict=True):
        for field in fields(CaseReport):
            values = getattr(report, field.name), getattr(other, field.name)
            assert type(values[0]) is type(values[1])
            np.testing.assert_array_equal(*values)


def test_a_second_check_reads_nothing_and_says_the_same(
    dataset: Dataset, tmp_path: Path, read: list[str]
) -> None:
    first = examine_all(dataset, tmp_path)
    ids = [case.id for case in dataset.cases]
    assert read == ids
    assert_same(examine_all(dataset, tmp_path), first)
    assert read == ids
    assert_same(first, [examine(case, dataset) for case in dataset.cases])


def test_changed_files_and_other_classes_are_read_again(
    dataset: Dataset, tmp_path: Path, read: list[str]
) -> None:
    examine_all(dataset, tmp_path)
    read.clear()
    changed = dataset.cases[2]
    image = nib.load(changed.images[0])
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj) + 1, image.affine), changed.images[0])
    os.utime(changed.images[0], ns=(1, 1))
    reports = examine_all(dataset, tmp_path)
    assert read == [changed.id]
    assert_same(reports, [examine(case, dataset) for case in dataset.cases])
    examine_all(replace(dataset, modalities=("CT",)), tmp_path)
    assert len(read) == 1 + len(dataset.cases)


def test_cases_with_errors_are_read_again(dataset: Dataset, tmp_path: Path, read: list[str]) -> None:
    broken = dataset.cases[1]
    broken.images[0].write_bytes(b"damaged")
    for _ in range(2):
        reports = examine_all(dataset, tmp_path)
        assert [bool(report.errors) for report in reports] == [False, True, *[False] * 5]
    assert read == [*(case.id for case in dataset.cases), broken.id]


def test_a_stopped_check_goes_on(dataset: Dataset, tmp_path: Path, read: list[str]) -> None:
    """Its last line was cut; what is no line of ours is left out."""
    expected = examine_all(dataset, tmp_path)
    lines = (tmp_path / FILE).read_bytes().split(b"\n")[1:]
    assert len(lines) == len(dataset.cases)
    (tmp_path / FILE).write_bytes(b"\xff\n{}\n" + b"\n".join(lines[:3]) + b"\n" + lines[3][:90])
    read.clear()
    assert_same(examine_all(dataset, tmp_path), expected)
    assert read == [case.id for case in dataset.cases[3:]]
    read.clear()
    assert_same(examine_all(dataset, tmp_path), expected)
    assert read == []


def test_a_cache_that_cannot_be_written_is_no_error(
    dataset: Dataset, tmp_path: Path, read: list[str]
) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        examine_all(dataset, tmp_path / "file")
    assert len(read) == 2 * len(dataset.cases)
