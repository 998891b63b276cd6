"""medconv/training/callbacks/progress.py: one curve for all groups with the same base learning rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor

from medconv.training.callbacks.progress import LearningRate


class Module(LightningModule):
    """Two groups with the same learning rate and one with a tenth of it; a schedule that halves them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(3))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return torch.stack([part(batch) for part in self.parts]).sum()

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(part.parameters()), "lr": lr}
            for part, lr in zip(self.parts, (1.0, 1.0, 0.1), strict=True)
        ]
        optimizer = torch.optim.SGD(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_each_base_learning_rate_has_a_curve():
    rates = []

    class Seen(LearningRate):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            rates.append({k: float(v) for k, v in trainer.logged_metrics.items()})

    trainer = Trainer(
        accelerator="cpu",
        max_steps=4,
        log_every_n_steps=2,
        logger=False,
        callbacks=[Seen()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=1))
    assert set(rates[-1]) == {"train/lr", "train/lr_2"}
    assert rates[1] == pytest.approx({"train/lr": 0.5, "train/lr_2": 0.05})
    assert rates[3] == pytest.approx({"train/lr": 0.125, "train/lr_2": 0.0125})
