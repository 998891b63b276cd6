"""Small images whose class, findings or number can be seen: real loaders of batches as a dataset of whole
images gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from medconv.features.image_level.encoder import Encoder
from medconv.features.image_level.losses import CrossEntropy, RegressionLoss
from medconv.features.image_level.mixup import Mixup
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.multilabel import MultilabelTargets
from medconv.features.image_level.regression import RegressionTargets
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.features.image_level.validation import ImageLevelValidation
from medconv.training.losses.fit import FittedLoss
from medconv.training.optim.lr_schedulers import constant
from medconv.training.task import Task

MEANS, STDS = (60.0, 1000.0), (10.0, 200.0)
CLASSES = MulticlassTargets(("dark", "bright", "brightest"))
FINDINGS = MultilabelTargets(("left", "right"))
NUMBERS = RegressionTargets(("age", "volume"), MEANS, STDS)


class Images(Dataset):
    """Args: cases: how many; validation names them, training numbers them."""

    def __init__(
        self, image_targets: ImageLevelTargets, cases: int, named: bool, size: tuple[int, ...] = (8, 8)
    ) -> None:
        self.image_targets, self.cases, self.named, self.size = image_targets, cases, named, size

    def __len__(self) -> int:
        return self.cases

    def __getitem__(self, number: int) -> dict[str, Any]:
        rng = np.random.default_rng([number, self.named])
        image = rng.normal(0, 0.3, (1, *self.size)).astype(np.float32)
        if self.image_targets == CLASSES:
            values = [float(number % 3)]
            image += values[0]
        elif self.image_targets == FINDINGS:
            values = [float(number % 2), float(number // 2 % 2)]
            image[:, :4] += 2 * values[0]
            image[:, 4:] += 2 * values[1]
        else:
            z = rng.normal(size=2)
            values = [MEANS[0] + STDS[0] * z[0], MEANS[1] + STDS[1] * z[1]]
            image[:, :4] += z[0]
            image[:, 4:] += z[1]
        key = {"case": f"case{number:03}"} if self.named else {"sample": number}
        return {"image": torch.from_numpy(image), "label": torch.tensor(values, dtype=torch.float32), **key}


def task(
    targets: ImageLevelTargets,
    network: torch.nn.Module | None = None,
    mirror_axes: Sequence[int] = (),
    mixup: Mixup | None = None,
) -> Task:
    torch.manual_seed(0)
    network = network or Encoder(2, 1, targets.num_outputs, [8, 16], [2])
    loss = RegressionLoss() if targets == NUMBERS else CrossEntropy(targets.exclusive)
    return Task(
        targets.finish(network),
        FittedLoss(loss, targets, 2),
        partial(torch.optim.AdamW, lr=2e-2),
        constant,
        targets,
        ImageLevelValidation(targets, mirror_axes),
        record={"of": "a test"},
        mixup=mixup,
    )


def fit(
    module: Task, steps: int, *callbacks: L.Callback, home: Path | None = None, ckpt_path: Path | None = None
) -> L.Trainer:
    """The module, trained on samples and validated on cases; no logger but what the trainer keeps."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        default_root_dir=home,
    )
    train = DataLoader(Images(module.targets, 16 * steps, named=False), batch_size=16)
    validation = DataLoader(Images(module.targets, 30, named=True), batch_size=8)
    trainer.fit(module, train, validation, ckpt_path=ckpt_path, weights_only=True)
    return trainer
