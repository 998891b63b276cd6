"""scripts/benchmarks/recipe.py at a tiny size: real trainings of a few seconds, their curves and results."""

import argparse
import os
import re
import sys
from xml.etree import ElementTree

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny
from helpers.benchmarks_harness import benchmark

from benchmark import main
from benchmarks import recipe
from medconv.data.datasets.dataset_json import auto
from medconv.data.splits import split_fold

SMALL = [o for o in tiny.SMALL if not o.startswith(("trainer.max_steps", "data.num_folds"))]


def arguments(tmp_path, *contestants, minutes="0.1"):
    dataset = tmp_path / "data"
    if not dataset.exists():
        tiny.write_dataset(dataset, cases=10)
    words = ["recipe", "--root", str(dataset), "--output", str(tmp_path / "out"), "--minutes", minutes]
    words += ["--snapshots", "2", "--score-cases", "1", "--cores", str(max(os.sched_getaffinity(0)))]
    return [*words, "--contestants", *contestants, "--set", *SMALL]


def refused(monkeypatch, capsys, *options):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *options])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    return capsys.readouterr().err


@pytest.mark.slow
def test_contestants_train_for_the_same_time_on_the_same_cases(monkeypatch, tmp_path, capsys):
    drawn = tmp_path / "recipe.svg"
    options = [*arguments(tmp_path, "medconv", "dynunet"), "--plot", str(drawn)]
    rows = benchmark(monkeypatch, tmp_path, *options)
    assert [row["variant"] for row in rows] == [f"medconv, {', '.join(SMALL)}", "MONAI DynUNet, plain loop"]
    _, val = split_fold(auto(tmp_path / "data").cases, 0, 5)
    for row in rows:
        folder = next(
            (tmp_path / "out/0.1min").glob("medconv-*" if "medconv" in row["variant"] else "dynunet")
        )
        check_result(row, folder, {case.id for case in val})
        assert (row["cores"], row["threads"], row["seconds"]) == (1, 1, 6)
    assert "MONAI DynUNet, plain loop | 0.1 |" in capsys.readouterr().out
    ElementTree.fromstring(drawn.read_text())

    written = file_times(tmp_path / "out/0.1min")
    assert benchmark(monkeypatch, tmp_path, *options) == rows
    assert file_times(tmp_path / "out/0.1min") == written  # finished trainings are not repeated
    done = tmp_path / "out/0.1min/dynunet"  # stopped while it predicted: its training is kept
    trained = (done / "training.json").read_text()
    (done / "result.json").unlink()
    next((done / "predictions/01").glob("*.nii.gz")).unlink()
    assert (
        benchmark(monkeypatch, tmp_path, *options) == rows and (done / "training.json").read_text() == trained
    )
    error = refused(monkeypatch, capsys, *options, "--seed", "1")
    assert "result.json was made with other settings (seed: 0, asked for now: 1)" in error


def file_times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def check_result(row, folder, val):
    """The curve is over one case, its end over all; the Dice is that of the label maps."""
    *_, last = curve = row["curve"]
    assert len(curve) == 2 and all(point["cases"] == 1 for point in curve)
    assert [p["seconds"] for p in curve] == sorted(p["seconds"] for p in curve)
    assert [p["steps"] for p in curve] == sorted({p["steps"] for p in curve})
    assert last["seconds"] > curve[0]["seconds"] > 0 and row["training_seconds"] == last["seconds"]
    predictions = folder / "predictions" / f"{len(curve) - 1:02d}"
    assert {path.name for path in predictions.glob("*.nii.gz")} == {f"{case}.nii.gz" for case in val}
    assert len(list((folder / "predictions/00").glob("*.nii.gz"))) == 1 and len(val) == 2
    dice = []
    for case in sorted(val):
        predicted, reference = (
            nib.load(f / f"{case}.nii.gz") for f in (predictions, folder.parents[2] / "data/labelsTr")
        )
        np.testing.assert_allclose(predicted.affine, reference.affine)
        a, b = np.asarray(predicted.dataobj) == 1, np.asarray(reference.dataobj) == 1
        dice.append(2 * (a & b).sum() / (a.sum() + b.sum()))
    assert row["dice_per_class"]["box"] == pytest.approx(np.mean(dice)) and row["dice_per_class"]["box"] > 0
    assert row["dice"] == pytest.approx(np.mean([v for v in row["dice_per_class"].values() if v is not None]))
    assert [path.stem for path in (folder / "snapshots").iterdir()] == [f"{len(curve) - 1:02d}"]


def test_nnunet_can_be_a_contestant(monkeypatch, tmp_path):
    python = os.environ.get("MEDCONV_NNUNET_PYTHON")
    if not python:
        pytest.skip("MEDCONV_NNUNET_PYTHON names no python that has nnU-Net")
    options = arguments(tmp_path, "nnunet", "nnunet-resenc", minutes="0.2")
    rows = benchmark(monkeypatch, tmp_path, *options, "--nnunet-python", python)
    assert [row["variant"] for row in rows] == ["nnU-Net", "nnU-Net ResEnc M"]
    assert [row["about"]["name"].split(", ")[1] for row in rows] == ["nnUNetPlans", "nnUNetResEncUNetMPlans"]
    for row, name in zip(rows, ("nnunet", "nnunet-resenc"), strict=True):
        logs = (tmp_path / "out/0.2min" / name / "results").rglob(
            "training_log*.txt"
        )  # one of training, one of prediction
        assert any("This split has 8 training and 2 validation cases" in log.read_text() for log in logs)
        predicted = {p.name for p in (tmp_path / "out/0.2min" / name / "predictions").rglob("*.nii.gz")}
        assert len(predicted) == 2 and row["steps"] >= 1


def test_a_failed_contestant_is_named_with_its_error(monkeypatch, tmp_path, capsys):
    command = (sys.executable, "-c", "raise SystemExit('error: no memory is left')")
    monkeypatch.setattr(recipe, "_command", lambda *_: command)
    error = refused(monkeypatch, capsys, *arguments(tmp_path, "medconv"))
    assert "1 of 1 trainings failed" in error
    assert "error: no memory is left" in error
    assert "Traceback" not in error


def test_impossible_options_are_refused(monkeypatch, tmp_path, capsys):
    options = arguments(tmp_path, "medconv")
    for more, expected in {
        ("--cores", "99"): r"--cores must be some of [\d,]+, got 99",
        ("--cores", "one"): r"--cores must be some of [\d,]+, got one",
        ("--pairs",): r"--pairs needs two cores, got \d+",
        ("--minutes", "0"): "--minutes must be more than 0, got 0",
        ("--fold", "5"): "--fold must lie between 0 and 4, got 5",
        ("--contestants", "medconv", "medconv"): "--contestants must be named once each",
        ("--minutes", "0.01"): "--minutes must be at least 0.05, got 0.01",
        ("--contestants", "nnunet"): "contestant nnunet needs --nnunet-python",
    }.items():
        assert re.search(expected, refused(monkeypatch, capsys, *options, *more))


def test_cases_of_a_patient_are_on_the_same_side_of_the_split(tmp_path):
    tiny.write_dataset(tmp_path / "data", cases=15)  # case_1 and case_11 are of one patient
    words = [*arguments(tmp_path, "medconv"), "--group-pattern", r"\d$"]
    parser = argparse.ArgumentParser()
    recipe.add_arguments(parser)
    bench = recipe._Bench.of(parser.parse_args(words[1:]))
    groups = {case.id[-1] for case in bench.train}, {case.id[-1] for case in bench.val}
    assert len(groups[1]) == 2 and not groups[0] & groups[1]
