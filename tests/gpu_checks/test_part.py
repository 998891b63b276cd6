"""scripts/gpu_checks/part.py: whatever happens in a part costs that part alone, and its error can be mended."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import torch
from helpers.processes import is_running
from helpers.waiting import until

from gpu_checks import part
from gpu_checks.claims import Claim, Expect, Skip
from gpu_checks.setting import FORK, Setting


def result_of(measure, folder, *expects, limit_s=300):
    claim = Claim("one", "smoke", "A claim", limit_s, expects, measure)
    return part.run(claim, Setting("cpu", False, folder / "one", folder / "shared", limit_s))


def gives(**figures):
    return lambda setting: figures


def test_figures_are_judged_by_what_was_expected(tmp_path):
    expects = Expect("error", most=0.1)
    assert result_of(gives(error=torch.tensor(0.05)), tmp_path / "a", expects)["verdict"] == "holds"
    assert result_of(gives(error=0.2), tmp_path / "b", expects)["verdict"] == "missed"
    assert result_of(gives(error=float("nan")), tmp_path / "c", expects)["verdict"] == "missed"
    assert result_of(gives(other=0.2), tmp_path / "d", expects)["verdict"] == "missed"


def test_an_error_comes_with_its_traceback_its_tensors_and_the_log(tmp_path):
    def fails(setting):
        print("half way", flush=True)
        image, weight = torch.zeros(2, 3, 4).transpose(1, 2), torch.zeros(5, dtype=torch.float16)
        return {"sum": image @ weight}

    result = result_of(fails, tmp_path)
    assert result["verdict"] == "failed" and "RuntimeError" in result["error"]
    assert "image: 2x4x3 float32 cpu strides (12, 1, 4); weight: 5 float16 cpu" in result["error"]
    assert 'return {"sum": image @ weight}' in result["error"] and "half way" in result["log"]


def test_what_cannot_be_shown_here_says_why(tmp_path):
    def skips(setting):
        raise Skip("needs two GPUs")

    result = result_of(skips, tmp_path)
    assert (result["verdict"], result["reason"]) == ("skipped", "needs two GPUs")


def test_a_crash_costs_that_part_alone_and_is_named(tmp_path):
    result = result_of(lambda setting: os.abort(), tmp_path)
    assert result["verdict"] == "failed" and "SIGABRT" in result["error"]
    assert "Fatal Python error: Aborted" in result["log"] and "test_part.py" in result["log"]


def test_a_part_that_hangs_ends_with_all_that_it_started_and_says_where_it_was(tmp_path, monkeypatch):
    """The limit comes as soon as the part has said where it is."""
    log = tmp_path / "one/log"

    class Late(FORK.Process):
        def join(self, timeout: float | None = None) -> None:
            if timeout is not None:
                until(lambda: log.is_file() and "in hangs" in log.read_text())
                timeout = 0.0
            super().join(timeout)

    monkeypatch.setattr(part, "FORK", SimpleNamespace(Process=Late))

    def hangs(setting):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (tmp_path / "child").write_text(str(child.pid))
        time.sleep(600)
        return {}

    result = result_of(hangs, tmp_path, limit_s=6)
    assert result["verdict"] == "timed out" and "not done after 6 s" in result["error"]
    assert "in hangs" in result["log"]
    child = int((tmp_path / "child").read_text())
    until(lambda: not is_running(child))


def test_a_command_that_fails_is_shown_as_it_would_be_typed_with_its_output(tmp_path):
    result = result_of(lambda setting: setting.train("run", "optimizer.lr=fast"), tmp_path)
    assert "python -m medconv.cli train trainer.accelerator=cpu" in result["error"]
    assert "ended with code 1" in result["error"] and "optimizer.lr" in result["log"]
    assert "Traceback (most recent call last)" in result["log"]


def test_a_part_that_used_the_device_cannot_fork(tmp_path):
    """CUDA would fail there; on a CPU the order is checked all the same."""

    def mixes(setting):
        torch.zeros(1, device=setting.device)
        return setting.train("run")

    assert "can start no command" in result_of(mixes, tmp_path)["error"]
