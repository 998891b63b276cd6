"""medconv/cli/preprocess_report.py: what `medconv preprocess` prints about a dataset, its plan and its errors."""

import json
import os

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny
from helpers.preprocess_command import overrides, run_preprocess

from medconv.cli.preprocess_report import table
from medconv.data.case import Case, Dataset, Grid
from medconv.data.io.images import UNORIENTED
from medconv.data.preprocessing import check as preprocessing_check
from medconv.data.preprocessing import dataset_cache
from medconv.data.preprocessing.examine import CaseReport
from medconv.utils.exit_codes import USER


def test_the_last_lines_name_the_store_and_the_plan_and_verify_finds_a_damaged_file(
    dataset, tmp_path, monkeypatch, capsys
):
    arguments = [
        *overrides(dataset, tmp_path / "cache"),
        "data.spacing_mm=[1,1.5,2]",
        "data.patch_size=[16,16,12]",
    ]
    out, _ = run_preprocess(arguments, tmp_path, monkeypatch, capsys)
    (home,) = (tmp_path / "cache").iterdir()
    (store,) = [path for path in home.iterdir() if path.is_dir()]
    size = sum(path.stat().st_size for path in store.iterdir()) / 1e6
    assert out.splitlines()[-4:] == [
        "prepared  7 cases of Tiny",
        f"store     {store}, {size:.1f} MB",
        f"findings  {home / 'fingerprint.json'}",
        "plan      spacing 1 x 1.5 x 2 mm, patch 16 x 16 x 12 voxels",
    ]
    before = {path: path.stat().st_mtime_ns for path in store.iterdir()}
    stat = (store / "case_3.image.npy").stat()
    content = bytearray((store / "case_3.image.npy").read_bytes())
    content[-1] ^= 1
    (store / "case_3.image.npy").write_bytes(content)
    os.utime(store / "case_3.image.npy", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    monkeypatch.setattr(dataset_cache, "_VERIFIED_AT_START", 0)  # as if the store were large
    assert "preparing 1" not in run_preprocess(arguments, tmp_path, monkeypatch, capsys)[0]
    assert (
        "preparing 1 of 7 cases" in run_preprocess([*arguments, "--verify"], tmp_path, monkeypatch, capsys)[0]
    )
    changed = {path.name.split(".")[0] for path, when in before.items() if path.stat().st_mtime_ns != when}
    assert changed == {"case_3"}


def test_many_classes_are_lines_of_their_own():
    names = tuple(f"class_{number}" for number in range(10))
    cases = (Case("a", ()), Case("b", ()), Case("broken", ()))
    dataset = Dataset("many", cases, names, ("CT",))
    grid = Grid.of((10, 10, 1), np.eye(4))
    reports = [
        CaseReport("a", grid=grid, class_voxels=(50, 30, 20, *[0] * 7)),
        CaseReport("b", grid=grid, class_voxels=(90, 10, *[0] * 8)),
        CaseReport("broken", errors=["unreadable"]),
    ]
    text = table(dataset, reports)
    head, *rows = text.split("\n\n")[0].splitlines()
    assert head.split()[-3:] == ["intensities", "foreground", "classes"]
    assert [row.split()[-5:] for row in rows[:2]] == [
        ["50.00", "%", "2", "of", "9"],
        ["10.00", "%", "1", "of", "9"],
    ]
    assert rows[2].endswith("1 error")
    classes = text.split("\n\n")[1].splitlines()
    assert len(classes) == 10
    assert [line.split() for line in classes[1:4]] == [
        ["class_1", "2", "20.00", "%"],
        ["class_2", "1", "20.00", "%"],
        ["class_3", "0", "-"],
    ]


def test_check_only_shows_a_table_and_writes_only_what_it_has_read(dataset, tmp_path, monkeypatch, capsys):
    """A second check reads no file; it shows the same."""
    arguments = [*overrides(dataset, tmp_path / "cache"), "--check-only"]
    out, err = run_preprocess(arguments, tmp_path, monkeypatch, capsys)
    head, *rows = out.splitlines()[:8]
    assert head.split("  ")[0] == "case" and head.split()[-3:] == ["intensities", "box", "hole"]
    assert [row.split()[0] for row in rows] == [f"case_{i}" for i in range(7)]
    assert rows[0].split()[1:13] == ["16", "x", "18", "x", "12", "1", "x", "1.5", "x", "2", "LAS", "1"]
    assert " %" in rows[0] and " to " in rows[0]
    words = " ".join(out.split())
    assert "the median image, 16 x 18 x 12, rounded up to what the strides divide" in words
    assert "batch 2 " in words and "the most medconv uses on a CPU" in words
    assert out.endswith("no errors in 7 cases of Tiny\n") and err == ""
    (home,) = (tmp_path / "cache").iterdir()
    assert sorted(path.name for path in home.iterdir()) == [".lock", "examined.jsonl"]
    monkeypatch.setattr(preprocessing_check, "examine", None)
    assert run_preprocess(arguments, tmp_path, monkeypatch, capsys) == (out, err)


def test_check_only_shows_what_concerns_many_cases_once(tmp_path, monkeypatch, capsys):
    root = tiny.write_dataset(tmp_path / "unoriented")
    for path in root.glob("*Tr/*.nii.gz"):
        image = nib.load(path)
        image.header.set_sform(None, 0)
        image.header.set_qform(None, 0)
        nib.save(nib.Nifti1Image(np.asarray(image.dataobj), None, image.header), path)
    arguments = [*overrides(root, tmp_path / "cache"), "--check-only"]
    out = run_preprocess(arguments, tmp_path, monkeypatch, capsys)[0]
    assert sum(UNORIENTED in line for line in out.splitlines()) == 1


def test_a_patient_on_both_sides_of_the_split_is_named_by_the_check_and_by_the_run(
    tmp_path, monkeypatch, capsys
):
    root = tiny.write_dataset(tmp_path / "patients", cases=6)
    text = (root / "dataset.json").read_text()
    for number in range(6):
        old = f"case_{number}.nii.gz"
        new = f"patient{number // 2}_frame{number % 2}.nii.gz"
        for folder in ("imagesTr", "labelsTr"):
            (root / folder / old).rename(root / folder / new)
        text = text.replace(old, new)
    (root / "dataset.json").write_text(text)
    arguments = [*overrides(root, tmp_path / "cache"), "--check-only"]
    out = run_preprocess(arguments, tmp_path, monkeypatch, capsys)[0]
    advice = "data.group_pattern='(.+)_frame' keeps a patient's cases in one fold"
    assert out.count(advice) == 1
    arguments.insert(-1, "data.group_pattern=(.+)_frame")
    assert "group_pattern" not in run_preprocess(arguments, tmp_path, monkeypatch, capsys)[0]
    tiny.train(root, tmp_path / "run", "trainer.max_steps=1")
    assert advice in json.loads((tmp_path / "run/summary.json").read_text())["split_warning"]


def test_copies_of_validation_images_are_named_and_training_skips_them(tmp_path, monkeypatch, capsys):
    root = tiny.write_dataset(tmp_path / "copied")
    content = (root / "imagesTr/case_0.nii.gz").read_bytes()
    for name in ("case_2", "case_4", "case_6"):
        (root / f"imagesTr/{name}.nii.gz").write_bytes(content)
    arguments = [*overrides(root, tmp_path / "cache"), "--check-only"]
    out, err = run_preprocess(arguments, tmp_path, monkeypatch, capsys)
    assert "warning: cases with the same image: case_0 = case_2 = case_4 = case_6; where" in out
    assert "images of training cases are also in validation or test; skipped in training: case_" in err + out


def test_check_only_names_the_key_of_a_wrong_fold(dataset, tmp_path, monkeypatch, capsys):
    arguments = [*overrides(dataset, tmp_path / "cache"), "--check-only", "data.fold=9"]
    err = run_preprocess(arguments, tmp_path, monkeypatch, capsys, USER)[1]
    assert err.startswith("error: data.fold")


def test_what_training_would_refuse_is_refused_by_the_check(dataset, tmp_path, monkeypatch, capsys):
    arguments = [*overrides(dataset, tmp_path / "cache"), "--check-only"]
    for wrong, message in (
        ("data.flip_label_pairs=[[box,hol]]", "there is no hol to swap; did you mean hole?"),
        ("run.dry_run=true", "--check-only prints the plan without preparing"),
    ):
        assert message in run_preprocess([*arguments, wrong], tmp_path, monkeypatch, capsys, USER)[1]


def test_check_only_of_few_cases_prints_the_plan_and_the_possible_folds(tmp_path, monkeypatch, capsys):
    root = tiny.write_dataset(tmp_path / "few", cases=4)
    arguments = [*overrides(root, tmp_path / "cache"), "--check-only", "data.num_folds=5"]
    out, err = run_preprocess(arguments, tmp_path, monkeypatch, capsys, USER)
    assert any(line.startswith("patch ") for line in out.splitlines())
    assert "data.num_folds=4 validates one case a fold, and data.fold=all trains on every case" in err


def test_check_only_lists_every_error_and_fails(tmp_path, monkeypatch, capsys):
    root = tiny.write_dataset(tmp_path / "damaged")
    (root / "imagesTr/case_1.nii.gz").write_bytes(b"")
    (root / "labelsTr/case_4.nii.gz").unlink()
    arguments = [*overrides(root, tmp_path / "cache"), "--check-only", "data.on_invalid_case=skip"]
    out, err = run_preprocess(arguments, tmp_path, monkeypatch, capsys, USER)
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("case_")}
    assert (
        rows["case_1"].endswith("1 error")
        and rows["case_4"].endswith("1 error")
        and rows["case_2"].endswith("%")
    )
    assert err.startswith("error: dataset Tiny: 2 errors in 7 cases\n  case case_1: ")
    (home,) = (tmp_path / "cache").iterdir()
    assert sorted(path.name for path in home.iterdir()) == [".lock", "examined.jsonl"]  # nothing is prepared


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["data.annotated={case_*: [box]}"], "no training case annotates hole"),
        (
            ["data.intensities=[{mean: 1, std: 1, percentile_00_5: 0, percentile_99_5: 2}]"],
            "data.intensities is for the normalisations",
        ),
        (
            [
                "data.normalisation=ct",
                "data.intensities=[{mean: 1, std: -1, percentile_00_5: 0, percentile_99_5: 2}]",
            ],
            "data.intensities needs finite numbers, std of 0 or more",
        ),
        (["data.fold=all", "data.num_folds=3"], "data.num_folds=3 has no effect: data.fold=all trains"),
    ],
)
def test_a_check_says_what_preparing_would_say(more, text, dataset, tmp_path, monkeypatch, capsys):
    arguments = [*overrides(dataset, tmp_path / "cache"), *more]
    checked = preprocess_texts(["--check-only", *arguments], tmp_path, monkeypatch, capsys)
    prepared = preprocess_texts(arguments, tmp_path, monkeypatch, capsys)
    assert text in checked and text in prepared


def preprocess_texts(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.call(monkeypatch, "preprocess", *arguments)
    shown = capsys.readouterr()
    return " ".join((shown.out + shown.err).split())


def test_the_share_of_a_class_is_its_median_over_the_cases_that_have_it():
    names = tuple(f"class_{number}" for number in range(10))
    dataset = Dataset("many", tuple(Case(name, ()) for name in "abcd"), names, ("CT",))
    grid = Grid.of((10, 10, 1), np.eye(4))
    reports = [
        CaseReport(name, grid=grid, class_voxels=(100 - voxels, voxels, *[0] * 8))
        for name, voxels in zip("abcd", (0, 1, 2, 60), strict=True)
    ]
    classes = table(dataset, reports).split("\n\n")[1].splitlines()
    assert classes[1].split() == ["class_1", "3", "2.00", "%"]
