"""medconv/inference/api.py: `medconv.load` is `Predictor.load`, with a device and a bar."""

from pathlib import Path

import numpy as np
import pytest

import medconv
from medconv.inference import sliding_window
from medconv.inference.predictor import Predictor
from medconv.utils.errors import ArgumentError


def test_the_predictor_counts_its_windows(exported, monkeypatch):
    counted = []

    def track(items, description):
        counted.append(len(items))
        return items

    monkeypatch.setattr(sliding_window, "track", track)
    checkpoint = exported.checkpoint
    image = np.random.default_rng(0).normal(size=(40, 20, 16)).astype(np.float32)
    label = medconv.load(checkpoint, device="cpu")(image, spacing_mm=(1, 1.5, 2))
    assert counted and label.shape == image.shape
    counted.clear()
    silent = medconv.load(checkpoint, device="cpu", progress=False)(image, spacing_mm=(1, 1.5, 2))
    expected = Predictor.load(checkpoint)(image, spacing_mm=(1, 1.5, 2))
    assert not counted
    assert np.array_equal(label, silent) and np.array_equal(label, expected)


def test_a_device_that_is_not_there_is_named(exported):
    with pytest.raises(ArgumentError, match="device"):
        medconv.load(exported.checkpoint, device="cuda:99")
    with pytest.raises(ValueError, match="no_such"):
        medconv.load(Path("no_such.ckpt"), device="cpu")
