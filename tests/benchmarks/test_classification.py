"""scripts/benchmarks/classification.py: networks are trained on a training set and measured on its test set."""

import numpy as np
import pytest
from helpers.benchmarks_harness import benchmark


@pytest.mark.slow
def test_classifiers_are_measured_on_the_test_set(monkeypatch, tmp_path):
    """Bright images are of class 1; finished runs are not repeated."""
    arrays, rng = {}, np.random.default_rng(0)
    for part, count in (("train", 24), ("val", 8), ("test", 12)):
        arrays[f"{part}_labels"] = (np.arange(count) % 2).astype(np.uint8)[:, None]
        noise = rng.integers(0, 60, (count, 16, 16))
        arrays[f"{part}_images"] = (noise + 150 * arrays[f"{part}_labels"][:, :, None]).astype(np.uint8)
    np.savez(tmp_path / "bright.npz", **arrays)
    settings = [
        "data.samples_per_epoch=24",
        "data.batch_size=8",
        "plan.channels=[4,8]",
        "trainer.accelerator=cpu",
    ]
    options = [
        "--root",
        str(tmp_path / "bright.npz"),
        "--output",
        str(tmp_path / "runs"),
        "--steps",
        "30",
        "--seeds",
        "1",
    ]
    arguments = [
        "classification",
        *options,
        "--variants",
        "conv=none",
        "conv=mirror,augmentation=none",
        "--set",
        *settings,
    ]
    rows = benchmark(monkeypatch, tmp_path, *arguments)
    assert [row["variant"] for row in rows] == ["conv=none", "conv=mirror,augmentation=none"]
    assert all(row["auc"] == [1.0] and len(row["accuracy"]) == 1 for row in rows)
    assert benchmark(monkeypatch, tmp_path, *arguments)[0]["train_seconds"] == rows[0]["train_seconds"]
