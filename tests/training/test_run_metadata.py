"""medconv/training/summary.py: what `summary.json` says of the software, the machine and the command."""

import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import lightning as L
import pytest
import torch

from medconv.training import summary


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
    assert 0.9 * 1024 * kilobytes < summary.peak_memory() < 100 * 1024 * kilobytes
