"""scripts/benchmarks/peers: the training steps of DynUNet and nnU-Net at a tiny size."""

import math
import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.benchmarks_harness import peers_are_forked

from benchmarks.peers import nnunet_step
from benchmarks.peers.process import DYNUNET, NNUNET, PeerProcess

TINY = [
    "--patch",
    "8",
    "8",
    "12",
    "--batch",
    "2",
    "--features",
    "4",
    "8",
    "16",
    "--classes",
    "3",
    "--threads",
    "1",
]
NNUNET_PYTHON = os.environ.get("MEDCONV_NNUNET_PYTHON")
needs_nnunet = pytest.mark.skipif(
    not NNUNET_PYTHON, reason="MEDCONV_NNUNET_PYTHON names no python that has nnU-Net"
)


def parameters(features, classes, dims, biases, heads):
    """Of a U-Net with two 3-kernels per stage, affine norms, transposed 2-kernels up, and `heads` coarse
    to fine.
    """

    def convolution(into, out):
        return into * out * 3**dims + out * (3 if biases else 2)

    total = sum(convolution(a, b) + convolution(b, b) for a, b in zip([1, *features], features, strict=False))
    for fine, coarse in pairwise(features):
        total += (
            coarse * fine * 2**dims
            + (fine if biases else 0)
            + convolution(2 * fine, fine)
            + convolution(fine, fine)
        )
    return total + sum(fine * classes + classes for fine in features[:heads])


@pytest.mark.parametrize("patch", [["8", "8", "12"], ["8", "12"]])
def test_dynunet_takes_a_step_on_request(patch, monkeypatch):
    peers_are_forked(monkeypatch)
    with PeerProcess(sys.executable, [*DYNUNET, *TINY, "--patch", *patch], limit_s=300) as peer:
        assert peer.about["parameters"] == parameters([4, 8, 16], 3, len(patch), biases=False, heads=1)
        assert peer.about["name"].startswith("MONAI") and "DynUNet" in peer.about["name"]
        assert (peer.about["precision"], peer.about["threads"], peer.about["compiled"]) == (
            "32-true",
            1,
            False,
        )
        assert peer.about["torch"] == torch.__version__ and math.isnan(peer.loss)
        losses = []
        for _ in range(12):
            assert peer.step() > 0
            losses.append(peer.loss)
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]  # the same batch: it learns
    assert peer._process.returncode == 0


@needs_nnunet
@pytest.mark.parametrize("patch", [["8", "8", "12"], ["8", "12"]])
def test_nnunet_takes_its_own_training_step(patch: list[str]) -> None:
    assert NNUNET_PYTHON is not None
    with PeerProcess(NNUNET_PYTHON, [*NNUNET, *TINY, "--patch", *patch], limit_s=300) as peer:
        assert peer.about["parameters"] == parameters([4, 8, 16], 3, len(patch), biases=True, heads=2)
        assert re.fullmatch(r"nnU-Net 2\.\d+\.\d+", peer.about["name"])
        assert (peer.about["precision"], peer.about["threads"], peer.about["compiled"]) == (
            "float32",
            1,
            False,
        )
        for _ in range(3):
            assert peer.step() > 0 and math.isfinite(peer.loss)
    assert peer._process.returncode == 0


def test_nnunet_runs_with_default_settings_in_temporary_folders(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"nnUNet_compile": "f", "nnUNet_raw": "/mine", "HOME": "/home"})
    nnunet_step._set_environment(tmp_path)
    assert os.environ.pop("HOME") == "/home" and set(os.environ) == {
        "nnUNet_raw",
        "nnUNet_preprocessed",
        "nnUNet_results",
    }
    assert all(Path(folder).parent == tmp_path for folder in os.environ.values())


def test_a_patch_that_the_stages_do_not_divide_is_refused(monkeypatch):
    peers_are_forked(monkeypatch)
    with pytest.raises(ValueError, match=r"--patch needs 2 or 3 sizes that 4 divides.*got \[8, 6\]"):
        PeerProcess(sys.executable, [*DYNUNET, *TINY, "--patch", "8", "6"], limit_s=300).__enter__()
