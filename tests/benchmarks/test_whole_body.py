"""scripts/benchmarks/whole_body.py: the peers predict the same, and a process is measured."""

import os
import subprocess
import sys

import numpy as np
import pytest
from helpers.benchmarks_harness import ROW_KEYS, benchmark, processes_are_forked
from helpers.waiting import PATIENCE_S

from benchmark import main
from benchmarks import whole_body


def test_both_ways_predict_the_same(tmp_path):
    """Up to what another resampling of the image changes; the air around the body is at odds nowhere."""
    image = whole_body._ct(tmp_path / "ct.nii.gz", size=64, slices=40)
    ours = whole_body._with_medconv(image, 5, 0.0)
    monais = whole_body._with_monai(image, 5, 0.0)
    assert ours.shape == monais.shape == (64, 64, 40) and len(np.unique(ours)) > 2
    assert (ours == monais).mean() > 0.7


def test_nnunet_predicts_the_same(tmp_path):
    python = os.environ.get("MEDCONV_NNUNET_PYTHON")
    if not python:
        pytest.skip("MEDCONV_NNUNET_PYTHON names no python that has nnU-Net")
    image = whole_body._ct(tmp_path / "ct.nii.gz", size=64, slices=40)
    ours = whole_body._with_medconv(image, 5, 0.5)
    labels = tmp_path / "labels.npy"
    command = [python, str(whole_body._NNUNET_SCRIPT), str(image), "5", "0.5", str(labels)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    assert (ours == np.load(labels)).mean() > 0.7


def test_nnunet_needs_its_own_python(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "whole_body", "--peers", "nnunet"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1 and "--peers nnunet needs --nnunet-python" in capsys.readouterr().err


@pytest.mark.slow
def test_time_and_memory_of_a_process_are_measured(monkeypatch, tmp_path):
    """Without the peers, whose logits would be too large."""
    processes_are_forked(monkeypatch)
    arguments = ["--size", "48", "--slices", "40", "--classes", "40", "--peer-gib", "0.01"]
    plot = tmp_path / "plot.svg"
    rows = benchmark(monkeypatch, tmp_path, "whole_body", *arguments, "--probabilities", "--plot", str(plot))
    assert [row["variant"] for row in rows] == ["medconv", "medconv, probabilities saved"]
    for row in rows:
        assert row["case"] == "48 x 48 x 40, 40 classes, overlap 0"
        assert set(row) >= ROW_KEYS and row["seconds"] > 0 and row["peak_gib"] > 0
    assert plot.exists()
