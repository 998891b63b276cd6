"""Mixup: what is trained on are weighted means of two samples of a batch, of their images and of what is
asked of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_PURPOSE = 7  # of the draws, apart from those of places and of augmentation


class Mixup:
    """Each sample keeps a share of itself, and has the rest of its partner in the batch.

    Shares and partners are drawn from (seed, sample numbers) alone. A partner is of the same batch on the
    same device, so that several devices mix other pairs than one.
    Args: alpha: of the share's distribution, Beta(alpha, alpha); 0: no mixing. The more, the closer to
    halves.
    Raises: ValueError: alpha is no number of 0 or more.
    Source: Zhang et al. 2018, arXiv:1710.09412; there one share for a batch, here one for each sample.
    """

    def __init__(self, alpha: float, seed: int) -> None:
        if type(alpha) not in (int, float) or not 0 <= alpha < math.inf:
            raise ValueError(f"task.mixup must be a number of 0 or more, got {alpha}")
        self.alpha, self.seed = float(alpha), seed

    def __call__(self, image: Tensor, target: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Shape: image (batch, channels, *spatial), target (batch, outputs), a number for each sample ->
        the same.
        """
        if not self.alpha:
            return image, target
        shares, partners = self.draw(numbers)
        partner = torch.from_numpy(partners).to(image.device)
        return tuple(  # type: ignore[return-value]
            torch.lerp(values[partner], values, _beside(shares, values)) for values in (image, target)
        )

    def draw(self, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The share that each sample keeps, and the index of its partner: in a circle in drawn order."""
        drawn = np.array([self._drawn(int(number)) for number in numbers])
        order = drawn[:, 1].argsort(kind="stable")
        partners = np.empty(len(order), np.int64)
        partners[order] = np.roll(order, -1)
        return drawn[:, 0], partners

    def _drawn(self, number: int) -> tuple[float, float]:
        rng = np.random.default_rng([self.seed, _PURPOSE, number])
        return float(rng.beta(self.alpha, self.alpha)), float(rng.random())


def _beside(shares: np.ndarray, values: Tensor) -> Tensor:
    """One for each sample, to be multiplied with its values."""
    return torch.from_numpy(shares).to(values).view(-1, *(1,) * (values.ndim - 1))
