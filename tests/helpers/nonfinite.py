"""Runs whose loss becomes non-finite, and the layer traces that they log."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from medconv.training.callbacks.nonfinite_guard import NonfiniteGuard
from medconv.training.task import Task

EXPLODES = ["optimizer=sgd", "optimizer.lr=1e30", "trainer.gradient_clip_val=null"]


class Line(L.LightningModule):
    """A linear layer whose loss becomes NaN at a step. Args: fused: by AdamW, which then takes the loss scale."""

    def __init__(self, fails_at: int, fused: bool = False) -> None:
        super().__init__()
        self.layer, self.fails_at, self.record, self.fused = torch.nn.Linear(1, 1), fails_at, {}, fused

    def loss_of(self, batch: dict[str, Any]) -> torch.Tensor:
        loss = self.layer(batch["image"]).float().square().mean() * 1e-3
        return loss * (torch.nan if self.trainer.global_step == self.fails_at else 1)

    training_step = lambda self, batch, index: self.loss_of(batch)  # noqa: E731
    configure_gradient_clipping = Task.configure_gradient_clipping

    def configure_optimizers(self) -> Any:
        if self.fused:
            return torch.optim.AdamW(self.parameters(), 1e-3, fused=True)
        return torch.optim.SGD(self.parameters(), 1e-3)


class Point(torch.utils.data.Dataset):
    dataset = property(lambda self: self)
    describe = staticmethod(lambda n: ("point", f"training sample {n}"))
    __len__ = lambda self: 40  # noqa: E731
    __getitem__ = lambda self, n: {"image": torch.ones(1), "sample": n}  # noqa: E731


def line_trainer(guard: NonfiniteGuard, **settings: Any) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", callbacks=[guard], enable_model_summary=False, **quiet, **settings)


def traces(caplog: pytest.LogCaptureFixture) -> list[list[str]]:
    """The lines of each layer trace in the log, without its heading."""
    heading = "layer by layer up to the first non-finite tensor:"
    return [text.splitlines()[1:] for text in caplog.messages if heading in text]
