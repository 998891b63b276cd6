"""medconv/sweeps/launch.py: one run or a sweep, from the same command line."""

import re
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from helpers.launchers import TORCHRUN
from helpers.processes import FORKED, Forked

from medconv.config import ConfigError
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.sweeps import launch, run
from medconv.targets.label_map import LabelMapTargets
from medconv.training.run_dir import RunDir
from medconv.utils.exit_codes import DONE, USER


def test_a_job_composes_its_config_from_the_same_places_as_the_sweep(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--config-name`, `--config-dir` and the user's own search path; its option fails in the job."""
    monkeypatch.setattr(run, "subprocess", FORKED)
    own, more = tmp_path / "own", tmp_path / "more"
    (more / "perf").mkdir(parents=True)
    (more / "perf/mine.yaml").write_text("matmul_precision: low\n")
    own.mkdir()
    lines = ["defaults:", "  - train", "  - override perf: mine", "  - _self_", "hydra:", "  mode: MULTIRUN"]
    (own / "mine.yaml").write_text("\n".join(lines) + "\n")
    options = ["--config-dir", str(own), "--config-name", "mine", f"hydra.searchpath=[file://{more}]"]
    code, output = Forked(*options, *tiny.overrides(dataset), "data.fold=0", cwd=tmp_path).wait()
    reason = "perf.matmul_precision must be highest, high or medium, got low"
    assert code == USER and output.count(f"error: {reason}") == 1, output
    assert f"failed, exit code 1: {reason}\n" in output


@pytest.mark.parametrize("many", [True, False])
def test_a_dry_run_prints_the_config_or_the_commands(many: bool, dataset: Path, tmp_path: Path) -> None:
    arguments = [*tiny.overrides(dataset), "run.name=planned", "run.dry_run=true"]
    code, output = Forked(*(["-m", "seed=1,2"] if many else []), *arguments, cwd=tmp_path).wait()
    assert code == DONE and not (tmp_path / "runs/planned").exists(), output
    if many:
        first, second = output.splitlines()
        assert first.startswith("medconv train ") and " seed=1 " in first and " seed=2 " in second
        assert "run.dry_run" not in output and "run.dir=" in first
        assert not (tmp_path / "runs/multirun.yaml").exists()
    else:
        assert output.startswith("# runs/planned\n") and "max_steps: 4" in output


def test_a_sweep_under_torchrun_is_refused(
    launched: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched(**TORCHRUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "-m", "seed=0,1"])
    with pytest.raises(ConfigError, match="its jobs start their own processes; run it without torchrun"):
        launch.train(["-m", "seed=0,1"])


def test_the_result_shows_scores_speed_and_files(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    dice = {
        "val/dice": 0.75,
        "val/dice_per_class": {"box": 0.5, "hole": None},
        "val/cases": {"a": {}, "b": {}},
        "targets": LabelMapTargets.of_classes(("background", "box", "hole")).plain(),
    }
    speed = {"steps": 4, "wall_seconds": 2.0, "samples_per_second": 3.25, "data_wait_share": 0.125}
    lines = launch.result_table({**dice, **speed}, folder).splitlines()
    assert lines[1:5] == [
        "Dice over 2 validation cases, best checkpoint",
        "  box              0.5000",
        "  hole               -   ",
        "  mean foreground  0.7500",
    ]
    assert "4 steps in 2.0 s, 3.2 samples/s, 12.5 % of the time waiting for data" in lines
    assert f"checkpoint  {folder.last}" in lines  # there is no best one
    targets = MulticlassTargets(("no", "yes")).plain()
    auc = {"targets": targets, "val/auc": 0.9, "val/accuracy": 0.8, "val/cases": {"a": {}}}
    text = launch.result_table(auc, folder)
    assert "scores over 1 validation cases" in text and re.search(r"\n  auc +0\.9000\n", text)
    assert "no validation" in launch.result_table({"targets": targets}, folder)


def test_a_caution_stands_below_the_scores(tmp_path: Path) -> None:
    targets = MulticlassTargets(("no", "yes")).plain()
    summary = {
        "targets": targets,
        "val/auc": 0.9,
        "val/cases": {"a": {}},
        "split_warning": "two of one patient",
    }
    lines = launch.result_table(summary, RunDir(tmp_path)).splitlines()
    scores_end = next(number for number, line in enumerate(lines) if "auc" in line)
    assert "caution: two of one patient" in lines[scores_end + 1 : scores_end + 3]
