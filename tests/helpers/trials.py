"""What a measured step works on."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from medconv.features.autotune.trial import Work


def work(network: nn.Module, batch: int = 2) -> Work:
    """Two-class segmentation of random images, which are the same at each call."""
    torch.manual_seed(0)
    image, label = torch.randn(batch, 1, 16, 16), torch.randint(2, (batch, 1, 16, 16))
    objective = lambda outputs, target: nn.functional.cross_entropy(outputs.float(), target[:, 0])  # noqa: E731
    return Work(network, objective, partial(torch.optim.AdamW, lr=1e-3), image, label)
