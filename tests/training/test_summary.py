"""medconv/training/summary.py: scores, status and metadata of a run."""

import json
import platform
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import lightning as L
import pytest
import torch

from medconv.targets.label_map import LabelMapTargets
from medconv.training import summary
from medconv.utils.cluster import PeerLostError
from medconv.utils.signals import RunInterrupted


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RunInterrupted(signal.SIGTERM), "preempted"),
        (PeerLostError("rank 1"), "preempted"),
        (RunInterrupted(signal.SIGINT), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
        (ValueError("no data"), "failed"),
    ],
)
def test_the_status_says_how_the_run_ended(error, status):
    assert summary.status_after(error) == status


def test_dice_is_the_mean_over_classes_of_the_means_over_cases():
    rows = {"a": {"box": 1.0, "hole": 0.5}, "b": {"box": 0.5, "hole": None}}
    scores = summary.best_scores(
        {"targets": LabelMapTargets.of_classes(["rest", "box", "hole"]).plain(), "validation": rows}
    )
    assert scores == {"val/dice": 0.625, "val/dice_per_class": {"box": 0.75, "hole": 0.5}, "val/cases": rows}


def test_image_level_scores_are_measured_on_all_cases_together():
    rows = {
        str(number): {"outputs": [0.0, logit], "values": [float(number % 2)]}
        for number, logit in enumerate((-1.0, 2.0, 1.0, 3.0))
    }
    record = {"targets": {"kind": "multiclass", "names": ["bright", "dark"]}, "validation": rows}
    scores = summary.best_scores(record)
    assert scores["val/accuracy"] == 0.75 and scores["val/auc"] == 1.0 and scores["val/cases"] == rows
    assert summary.best_scores({**record, "validation": {}}) == {"val/cases": {}}


def test_an_empty_summary_is_valid_and_has_every_key():
    empty = dict.fromkeys(summary.KEYS)
    assert {"status", "val/dice", "command"} <= set(empty)
    assert summary.is_valid(empty)


def test_rows_of_cases_may_be_nested_but_hold_numbers_alone():
    row = {"apex": {"error_mm": 1.5, "is_there": True, "heights": [0.5, None]}}
    assert summary.is_valid({"val/cases": {"a": row}})
    assert not summary.is_valid({"val/cases": {"a": {"apex": {"error_mm": "1.5"}}}})


def test_metadata_names_versions_device_and_command_and_can_be_json(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/medconv/cli/__main__.py", "train", "seed=3"])
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    metadata = json.loads(json.dumps(summary.run_metadata(trainer)))
    assert metadata["command"] == "medconv train seed=3"
    assert metadata["versions"]["python"] == platform.python_version()
    assert metadata["versions"]["medconv"] == version("medconv")
    assert metadata["versions"]["torch"] == version("torch")  # PyPI's, without +cu130
    hardware = metadata["hardware"]
    assert (hardware["device"], hardware["devices"]) == ("cpu", 1)
    assert hardware["torch_threads"] == torch.get_num_threads() and hardware["cores"] >= 1


def test_the_command_is_named_as_the_script_that_was_called(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/checkout/train.py", "seed=3"])
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert summary.run_metadata(trainer)["command"] == "train.py seed=3"


def test_the_commit_is_that_of_the_checkout_and_none_for_an_installed_package(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "PACKAGE", tmp_path / "medconv")
    assert summary.git_commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert summary.git_commit() is None  # there is no commit yet
    subprocess.run([*git, "commit", "-q", "--allow-empty", "--no-gpg-sign", "-m", "first"], check=True)
    commit = summary.git_commit()
    assert commit is not None and len(commit) == 40
    log = subprocess.run([*git, "log", "--format=%H"], check=True, capture_output=True, text=True)
    assert log.stdout.split() == [commit]


def test_peak_memory_of_a_cpu_is_in_bytes():
    if torch.cuda.is_initialized():
        pytest.skip("then it is the memory of the GPU")
    (kilobytes,) = (
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    assert 0.9 * 1024 * kilobytes < summary.peak_memory(on_gpu=False) < 100 * 1024 * kilobytes
