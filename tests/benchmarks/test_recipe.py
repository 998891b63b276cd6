"""scripts/benchmarks/recipe.py at a tiny size: real trainings of a few seconds, and what their numbers
stand on.
"""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny
from helpers.benchmarks_harness import ManualClock, benchmark

from benchmark import main
from benchmarks import dice_curves, recipe
from benchmarks.peers import training
from medconv.data.datasets.auto import auto
from medconv.data.splits import split_fold
from medconv.training.callbacks.time_budget import TimeBudget

SMALL = [o for o in tiny.SMALL if not o.startswith(("trainer.max_steps", "data.num_folds"))]


def arguments(tmp_path: Path, *contestants: str, minutes: str = "0.1") -> list[str]:
    dataset = tmp_path / "data"
    if not dataset.exists():
        tiny.write_dataset(dataset, cases=10)
    found = ["recipe", "--root", str(dataset), "--output", str(tmp_path / "out"), "--minutes", minutes]
    found += ["--snapshots", "2", "--score-cases", "1", "--cores", str(max(os.sched_getaffinity(0)))]
    return [*found, "--contestants", *contestants, "--set", *SMALL]


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *given: str) -> str:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *given])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    return capsys.readouterr().err


@pytest.mark.slow
def test_contestants_train_for_the_same_time_on_the_same_cases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = tmp_path / "recipe.svg"
    given = [*arguments(tmp_path, "medconv", "dynunet"), "--plot", str(drawn)]
    rows = benchmark(monkeypatch, tmp_path, *given)
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
    assert benchmark(monkeypatch, tmp_path, *given) == rows
    assert file_times(tmp_path / "out/0.1min") == written  # what is finished is not repeated
    done = tmp_path / "out/0.1min/dynunet"  # ended while it predicted: its training counts
    trained = (done / "training.json").read_text()
    (done / "result.json").unlink()
    next((done / "predictions/01").glob("*.nii.gz")).unlink()
    assert (
        benchmark(monkeypatch, tmp_path, *given) == rows and (done / "training.json").read_text() == trained
    )
    said = refused(monkeypatch, capsys, *given, "--seed", "1")
    assert "result.json was made with other settings (seed: 0, asked for now: 1)" in said


def file_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def check_result(row: dict, folder: Path, val: set[str]) -> None:
    """Curves that stand on one case, an end that stands on all, and a Dice that is that of the files."""
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
        found, wanted = (
            nib.load(f / f"{case}.nii.gz") for f in (predictions, folder.parents[2] / "data/labelsTr")
        )
        np.testing.assert_allclose(found.affine, wanted.affine)
        a, b = np.asarray(found.dataobj) == 1, np.asarray(wanted.dataobj) == 1
        dice.append(2 * (a & b).sum() / (a.sum() + b.sum()))
    assert row["dice_per_class"]["box"] == pytest.approx(np.mean(dice)) and row["dice_per_class"]["box"] > 0
    assert row["dice"] == pytest.approx(np.mean([v for v in row["dice_per_class"].values() if v is not None]))
    assert [path.stem for path in (folder / "snapshots").iterdir()] == [f"{len(curve) - 1:02d}"]


def test_nnunet_is_a_contestant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = os.environ.get("MEDCONV_NNUNET_PYTHON")
    if not python:
        pytest.skip("MEDCONV_NNUNET_PYTHON names no python that has nnU-Net")
    given = arguments(tmp_path, "nnunet", "nnunet-resenc", minutes="0.2")
    rows = benchmark(monkeypatch, tmp_path, *given, "--nnunet-python", python)
    assert [row["variant"] for row in rows] == ["nnU-Net", "nnU-Net ResEnc M"]
    assert [row["about"]["name"].split(", ")[1] for row in rows] == ["nnUNetPlans", "nnUNetResEncUNetMPlans"]
    for row, name in zip(rows, ("nnunet", "nnunet-resenc"), strict=True):
        logs = (tmp_path / "out/0.2min" / name / "results").rglob(
            "training_log*.txt"
        )  # one of training, one of prediction
        assert any("This split has 8 training and 2 validation cases" in log.read_text() for log in logs)
        predicted = {p.name for p in (tmp_path / "out/0.2min" / name / "predictions").rglob("*.nii.gz")}
        assert len(predicted) == 2 and row["steps"] >= 1


def test_a_contestant_that_fails_is_named_with_what_it_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, *arguments(tmp_path, "medconv"), "model.chanels=[4]")
    assert (
        "1 of 1 trainings failed" in said
        and "there is no key model.chanels" in said
        and "Traceback" not in said
    )


def test_options_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path, "medconv")
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
        assert re.search(expected, refused(monkeypatch, capsys, *given, *more))


def test_the_split_is_that_of_nnunet(tmp_path: Path) -> None:
    """Expected: `generate_crossval_split` of nnU-Net 2.8.1 for ten sorted ids, seed 12345, five folds."""
    root = tiny.write_dataset(tmp_path / "data", cases=10)
    train, val = split_fold(auto(root).cases, 0, 5)
    assert [case.id for case in val] == ["case_0", "case_7"] and len(train) == 8


def test_a_step_is_taken_where_half_of_it_fits() -> None:
    now = ManualClock()
    clock = training.Clock(10, now)
    clock.start()
    taken = []
    for step in (6.0, 2.0, 1.0, 1.0, 9.0):
        if not clock.fits():
            break
        now.wait(step)
        taken.append(step)
    assert taken == [6.0, 2.0, 1.0] + [1.0]  # 6 + 3 fit into 10, 10 + 0.5 do not


def test_excluded_time_is_not_of_the_budget() -> None:
    clock = ManualClock()
    budget = TimeBudget(10.0, clock)
    loops = SimpleNamespace(epoch_loop=None)
    trainer = SimpleNamespace(
        global_step=0, estimated_stepping_batches=9, lr_scheduler_configs=[], fit_loop=loops
    )
    budget.on_train_start(trainer, None)
    clock.wait(3.0)
    budget.exclude(1.0)
    assert budget.state_dict()["spent"] == pytest.approx(2.0)


def test_snapshots_are_denser_early() -> None:
    found = recipe.times(1200, 10)
    assert len(found) == 9 and found[0] == pytest.approx(40) and found[-1] < 1200
    steps = np.diff(found)
    assert (np.diff(steps) > 0).all()
    assert recipe.times(60, 1) == []


def test_the_clock_stands_still_while_weights_are_kept(tmp_path: Path) -> None:
    now = ManualClock()
    job = training.Job("", "", "", "", str(tmp_path), [], ["a", "b"], 1, 10, [2, 3, 6], 1, 0, [])
    clock = training.Clock(job.seconds, now)
    snapshots, steps = training.Snapshots(job, clock), 0
    clock.start()
    while clock.fits():
        now.wait(0.4)
        steps += 1
        snapshots.after_step(steps, lambda path: (path.touch(), now.wait(50)))
    snapshots.finish(steps, lambda path: path.touch(), name="me")
    assert now() == pytest.approx(100 + 10 + 3 * 50) and clock.share == pytest.approx(1)
    kept = job.snapshots
    assert [s["cases"] for s in kept] == [["a"], ["a"], ["a"], ["a", "b"]]
    assert [s["seconds"] for s in kept] == pytest.approx([2, 3.2, 6, 10])
    assert [s["steps"] for s in kept] == [5, 8, 15, 25]


def test_a_slow_step_makes_one_snapshot(tmp_path: Path) -> None:
    job = training.Job("", "", "", "", str(tmp_path), [], ["a"], 1, 10, [0.01, 0.02, 5.0], 1, 0, [])
    now = ManualClock()
    clock = training.Clock(job.seconds, now)
    snapshots = training.Snapshots(job, clock)
    clock.start()
    assert not snapshots.after_step(0, lambda path: path.touch())
    now.wait(0.05)
    assert snapshots.after_step(1, lambda path: path.touch())
    assert not snapshots.after_step(2, lambda path: path.touch())


def test_the_chart_spaces_dice_by_its_distance_from_one(tmp_path: Path) -> None:
    curves = [
        dice_curves.Curve("a <b>", ((10, 0.0), (100, 0.9), (1000, 0.99)), 0.99),
        dice_curves.Curve("c_$1", ((10, 0.5), (1000, 0.8)), 0.8),
        dice_curves.Curve("a <b>", ((5, 0.2), (50, 0.5)), 0.5),
    ]
    dice_curves.draw(curves, tmp_path / "p.svg", "title & $more$")
    tree = ElementTree.fromstring((tmp_path / "p.svg").read_text())
    tag = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in tree.iter(f"{tag}text")]
    assert {"title & $more$", "a <b>", "c_$1", "0.990", "0.800", "10 s", "0.9"} <= set(texts)
    assert texts.count("a <b>") == 1
    lines = [path for path in tree.iter(f"{tag}path") if "stroke-width: 1.5" in path.get("style", "")]
    first, second, third = lines[:3]  # the best result first; those of the legend come after them
    numbers = [float(number) for number in re.findall(r"[\d.]+", first.attrib["d"])]
    (x0, y0), (x1, y1), (x2, y2) = zip(numbers[::2], numbers[1::2], strict=True)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert x2 > x0 > 0 and y0 > y2 > 0

    def colour(line: ElementTree.Element) -> str:
        return re.search(r"stroke: (#\w+)", line.attrib["style"])[1]

    assert colour(first) == colour(third) != colour(second)


def test_the_same_curves_give_the_same_chart(tmp_path: Path) -> None:
    curves = [dice_curves.Curve("a", ((0.0, 1.0),), 1.0)]  # at the ends of both axes
    for name in ("p.svg", "q.svg"):
        dice_curves.draw(curves, tmp_path / name, "title")
    assert (tmp_path / "p.svg").read_bytes() == (tmp_path / "q.svg").read_bytes()


def test_a_chart_needs_a_curve(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no curve to draw yet"):
        dice_curves.draw([], tmp_path / "q.svg", "nothing")


def test_rows_of_earlier_calls_are_drawn_as_well(tmp_path: Path) -> None:
    row = {
        "variant": "a",
        "curve": [{"seconds": 10, "dice": 0.5}, {"seconds": 20, "dice": None}],
        "dice": 0.8,
        "more": 1,
    }
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    (tmp_path / "others.json").write_text(json.dumps([{"variant": "nn.Conv", "ratio": 1}]))
    (found,) = recipe._earlier([tmp_path / "rows.json"])
    assert recipe._curve(found) == dice_curves.Curve("a", ((10, 0.5), (20, 0.0)), 0.8)
    for name in ("others.json", "none.json"):
        with pytest.raises(ValueError, match=f"--beside .*{name}: no rows of this benchmark"):
            recipe._earlier([tmp_path / name])
