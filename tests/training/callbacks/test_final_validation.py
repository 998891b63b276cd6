"""medconv/training/checkpoint/resumable_loop.py: a run ends with a validation and a checkpoint, done once."""

import csv

import pytest
import torch
from helpers import tiny


@pytest.mark.parametrize("end", ["trainer.max_steps=3", "trainer.max_epochs=2"])
def test_the_last_step_is_validated_and_saved(dataset, tmp_path, end):
    """In the middle of an epoch of four steps, or in an epoch without a validation of its own."""
    settings = ["trainer.max_steps=-1", end, "trainer.check_val_every_n_epoch=3"]
    summary = tiny.train(dataset, tmp_path / "run", *settings)
    assert len(summary["val/cases"]) == 3
    saved = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == summary["steps"] == (3 if "steps" in end else 8)


@pytest.mark.parametrize(
    ("between", "validations"),
    [
        (["trainer.val_check_interval=3"], 3),  # after 3 of 4 batches of both epochs, and at the end
        # counted across epochs
        (["trainer.val_check_interval=8", "trainer.check_val_every_n_epoch=null"], 1),
    ],
)
def test_the_last_batch_is_validated_once(dataset, tmp_path, between, validations):
    tiny.train(
        dataset, tmp_path / "run", "logger=none", "trainer.max_steps=-1", "trainer.max_epochs=2", *between
    )
    with (tmp_path / "run/metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/dice")]
    assert len(rows) == validations and int(rows[-1]["step"]) in (7, 8)
