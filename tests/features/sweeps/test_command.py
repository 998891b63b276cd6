"""medconv/features/sweeps/launch.py: one run or a sweep, from the same command line."""

import pytest
from helpers import tiny
from helpers.launchers import TORCHRUN
from helpers.processes import FORKED, Forked

from medconv.cli import main
from medconv.config import ConfigError
from medconv.features.sweeps import run
from medconv.utils.exit_codes import DONE, USER


def test_a_job_composes_its_config_from_the_same_places_as_the_sweep(dataset, tmp_path, monkeypatch):
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
def test_a_dry_run_prints_the_config_or_the_commands(many, dataset, tmp_path):
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


def test_a_sweep_under_torchrun_is_refused(launched, monkeypatch, tmp_path):
    launched(**TORCHRUN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="its jobs start their own processes; run it without torchrun"):
        main.run(["train", "-m", "seed=0,1"])
