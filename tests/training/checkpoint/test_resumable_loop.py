"""medconv/training/checkpoint/resumable_loop.py: random numbers of a batch, and the last validation."""

import csv
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import tiny
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from medconv.training.checkpoint.resumable_loop import PerStepSeeding, ResumableEpochLoop, ResumableTrainer
from medconv.training.checkpoint.writer import AtomicCheckpointIO, CheckpointWriter
from medconv.training.distributed import StopSync
from medconv.utils.signals import StopRequest


def test_a_method_that_lightning_renamed_is_an_error(tmp_path, monkeypatch):
    """Otherwise the override would silently never be called."""
    checkpoints = CheckpointWriter(tmp_path, AtomicCheckpointIO(), every=60)
    stops, settings = StopSync(StopRequest(), 1), {"accelerator": "cpu", "logger": False}
    trainer = ResumableTrainer(checkpoints, stops, enable_checkpointing=False, max_steps=7, **settings)
    assert trainer.max_steps == 7 and isinstance(trainer.fit_loop.epoch_loop, ResumableEpochLoop)
    for owner, name in (
        (_TrainingEpochLoop, "_should_check_val_fx"),
        (_SignalConnector, "register_signal_handlers"),
    ):
        with monkeypatch.context() as patch:
            patch.delattr(owner, name)
            with pytest.raises(ValueError, match=rf"lightning [\d.]+ has no {name}.*below 2\.7"):
                ResumableTrainer(checkpoints, stops, enable_checkpointing=False, **settings)


def test_random_numbers_follow_from_seed_rank_and_batch():
    def drawn(seed, rank, batch):
        trainer = SimpleNamespace(global_rank=rank, fit_loop=SimpleNamespace(total_batch_idx=batch))
        PerStepSeeding(seed).on_train_batch_start(trainer, None, None, 0)
        return float(torch.rand(())), float(np.random.rand()), random.random()

    first = drawn(1, 0, 5)
    assert drawn(1, 0, 5) == first
    for other in ((2, 0, 5), (1, 1, 5), (1, 0, 6)):
        assert not set(drawn(*other)) & set(first), other


@pytest.mark.parametrize("end", ["trainer.max_steps=3", "trainer.max_epochs=2"])
def test_the_last_step_is_validated_and_saved(dataset, tmp_path, end):
    """In the middle of an epoch of four steps, or in an epoch without a validation of its own."""
    settings = ["trainer.max_steps=-1", end, "trainer.check_val_every_n_epoch=3"]
    summary = tiny.train(dataset, tmp_path / "run", *settings)
    assert len(summary["val/cases"]) == 3
    saved = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == summary["steps"] == (3 if "steps" in end else 8)


def test_a_validation_waits_for_the_step_of_accumulated_batches(dataset, tmp_path):
    """Else `best.ckpt`, which is written after the next step, would hold other weights than were validated."""
    settings = ["trainer.accumulate_grad_batches=2", "trainer.val_check_interval=1", "trainer.max_steps=4"]
    tiny.train(dataset, tmp_path / "run", "logger=none", *settings)
    with (tmp_path / "run/metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/dice")]
    assert len(rows) == 4  # of eight batches
    # the last step of an epoch may be of fewer batches
    settings = ["trainer.accumulate_grad_batches=2", "trainer.limit_train_batches=3", "trainer.max_epochs=2"]
    tiny.train(dataset, tmp_path / "odd", "logger=none", "trainer.max_steps=-1", *settings)
    with (tmp_path / "odd/metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/dice")]
    assert [row["step"] for row in rows] == ["1", "3"]  # after the second step of each epoch


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
