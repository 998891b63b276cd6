"""medconv/training/checkpoint/resumable_loop.py: what it needs of Lightning, and the seed of each step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from medconv.training.checkpoint import resumable_loop
from medconv.training.checkpoint.resumable_loop import PerStepSeeding, ResumableEpochLoop


def test_a_method_that_lightning_renamed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the override would silently never be called."""
    own = {"owed", "max_steps", "_between_steps"}
    assert {name for name in vars(ResumableEpochLoop) if not name.startswith("__")} - own <= set(
        resumable_loop._OVERRIDDEN
    )
    trainer: Any = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    monkeypatch.delattr(_TrainingEpochLoop, "_should_check_val_fx")
    with pytest.raises(ValueError, match=r"lightning [\d.]+ has no _should_check_val_fx.*below 2\.7"):
        resumable_loop.install(trainer, *([None] * 3))  # type: ignore[arg-type]


def test_random_numbers_follow_from_seed_rank_and_batch() -> None:
    def drawn(seed: int, rank: int, batch: int) -> tuple[float, float, float]:
        trainer: Any = SimpleNamespace(global_rank=rank, fit_loop=SimpleNamespace(total_batch_idx=batch))
        PerStepSeeding(seed).on_train_batch_start(trainer, None, None, 0)  # type: ignore[arg-type]
        return float(torch.rand(())), float(np.random.rand()), random.random()

    first = drawn(1, 0, 5)
    assert drawn(1, 0, 5) == first
    for other in ((2, 0, 5), (1, 1, 5), (1, 0, 6)):
        assert not set(drawn(*other)) & set(first), other
