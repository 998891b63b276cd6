"""scripts/benchmarks/whole_body.py: the peer predicts the same, and a process is measured."""

from pathlib import Path

import numpy as np
import pytest
from helpers.benchmarks_harness import ROW_KEYS, benchmark

from benchmarks import whole_body


def test_both_ways_predict_the_same(tmp_path: Path) -> None:
    """Up to what another resampling of the image changes; the air around the body is at odds nowhere."""
    image = whole_body._ct(tmp_path / "ct.nii.gz", size=64, slices=40)
    ours = whole_body._with_medconv(image, 5, 0.0)
    monais = whole_body._with_monai(image, 5, 0.0)
    assert ours.shape == monais.shape == (64, 64, 40) and len(np.unique(ours)) > 2
    assert (ours == monais).mean() > 0.7


def test_time_and_memory_of_a_process_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the peer, whose logits would be too large."""
    arguments = ["--size", "48", "--slices", "40", "--classes", "200", "--peer-gib", "0.01"]
    (row,) = benchmark(monkeypatch, tmp_path, "whole_body", *arguments)
    assert (row["case"], row["variant"]) == ("48 x 48 x 40, 200 classes, overlap 0", "medconv")
    assert set(row) >= ROW_KEYS and row["seconds"] > 0 and row["peak_gib"] > 0
