"""The networks and the steps that several parts measure, and what they would take at the hardware's limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from gpu_checks.limits import Peaks, step_seconds, step_work
from medconv.features.autotune.trial import Choice, Trial, Work
from medconv.models.unet import UNet
from medconv.targets.label_map import LabelMapTargets
from medconv.training.losses.fit import FittedLoss
from medconv.training.losses.segmentation import DiceCrossEntropy


@dataclass(frozen=True)
class Size:
    """Of a step of the default network: `features` are channels per stage, `patch` voxels, `channels` the
    image's."""

    patch: tuple[int, ...]
    channels: int
    classes: int
    batch: int
    features: tuple[int, ...]
    norm: str = "batch"

    def unet(self) -> nn.Module:
        strides = [2] * (len(self.features) - 1)
        return UNet(len(self.patch), self.channels, self.classes, self.features, strides, norm=self.norm)

    def work(self, device: torch.device, optimizer: Callable[..., Any]) -> Work:
        image = torch.randn(self.batch, self.channels, *self.patch, device=device)
        label = torch.randint(self.classes, (self.batch, 1, *self.patch), device=device)
        targets = LabelMapTargets.of_classes([str(number) for number in range(self.classes)])
        loss = FittedLoss(DiceCrossEntropy(), targets, len(self.patch))
        return Work(self.unet(), loss, optimizer, image, label)

    def limit_seconds(self, peaks: Peaks) -> float:
        """Of a training step in bf16: each convolution and norm at its own limit."""
        return step_seconds(peaks, self._work)

    def predicting_seconds(self, peaks: Peaks) -> float:
        """Of a prediction for the batch in bf16."""
        shape = (self.batch, self.channels, *self.patch)
        return step_seconds(peaks, step_work(self.unet, shape, backward=False))

    @property
    def operations(self) -> float:
        """Of the convolutions of a training step."""
        return sum(operations for _, operations in self._work)

    @property
    def _work(self) -> tuple[tuple[float, float], ...]:
        return step_work(self.unet, (self.batch, self.channels, *self.patch))

    def words(self) -> list[str]:
        """As `scripts/benchmark.py step` takes it."""
        numbers = {"patch": self.patch, "features": self.features}
        words = [word for key, values in numbers.items() for word in (f"--{key}", *map(str, values))]
        words += ["--channels", str(self.channels), "--classes", str(self.classes)]
        return [*words, "--batch", str(self.batch), "--norm", self.norm]


# NVIDIA's nnU-Net: 29.96 images/s on an A100 with AMP, channels-last and a fused instance norm, no
# augmentation; here with the norm of our default network.
NVIDIA = Size((128, 128, 128), 4, 4, 4, (32, 64, 128, 256, 320, 320))
HIPPOCAMPUS = Size((40, 56, 40), 1, 3, 2, (32, 64, 128, 256))
# The phantoms as they are planned for a GPU, without a limit of time; their images are about one patch.
PHANTOM = Size((56, 56, 32), 1, 6, 2, (32, 64, 128, 256))
# The phantoms in large patches: what a training of them is told, and how it is planned then.
LARGE_PATCHES = ("data.patch_size=[128,128,128]", "data.batch_size=2", "data.spacing_mm=[0.7,0.7,0.7]")
LARGE_PHANTOM = replace(NVIDIA, channels=1, classes=PHANTOM.classes, batch=2)
TINY = Size((16, 16, 16), 1, 3, 2, (4, 8))
ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)
FAST = Choice("bf16-mixed", channels_last=True, fast_norm=True, fast_depthwise=True)


def seconds(step: Callable[[], Any], device: torch.device, rounds: int, warm_up: int = 5) -> float:
    """Median of so many calls, with the device idle before and after each ten of them."""
    for _ in range(warm_up):
        step()
    times = []
    for _ in range(rounds):
        wait(device)
        start = time.perf_counter()
        for _ in range(10 if device.type == "cuda" else 1):
            step()
        wait(device)
        times.append((time.perf_counter() - start) / (10 if device.type == "cuda" else 1))
    return median(times)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trial(size: Size, choice: Choice, device: torch.device, optimizer: Callable[..., Any] = ADAMW) -> Trial:
    torch.manual_seed(0)
    return Trial(size.work(device, optimizer), choice)
