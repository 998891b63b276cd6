"""Mixup: trains on weighted means of two samples of a batch, of their images and of their targets."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from medconv.data.random_streams import RandomStream, generator
from medconv.utils.hardware import to_device


class Mixup:
    """Replaces each sample by share * itself + (1 - share) * its partner in the batch.

    Shares and partners are a function of seed and sample numbers. A partner is in the same batch on the
    same device, so that several devices mix other pairs than one.

    Args:
        alpha: the share follows Beta(alpha, alpha). 0: no mixing; large: shares near one half.
        seed: of the run.
    Raises:
        ValueError: alpha is not a number of 0 or more.
    Source: Zhang et al. 2018, arXiv:1710.09412; there one share per batch, here one per sample.
    """

    def __init__(self, alpha: float, seed: int) -> None:
        if type(alpha) not in (int, float) or not 0 <= alpha < math.inf:
            raise ValueError(f"alpha must be a number of 0 or more, got {alpha}")
        self.alpha = float(alpha)
        self.seed = seed

    def __call__(self, image: Tensor, target: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Shape: image (batch, channels, *spatial), target (batch, outputs) -> the same.

        Args: numbers: of the samples.
        """
        if not self.alpha:
            return image, target
        shares, partners = self.draw(numbers)
        partner_indices = to_device(torch.from_numpy(partners), image.device)
        return _mixed(image, partner_indices, shares), _mixed(target, partner_indices, shares)

    def draw(self, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Each sample's share of itself, and the index of its partner: the next one in a random order."""
        draws = np.array([self._draw_sample(int(number)) for number in numbers])
        shares = draws[:, 0]
        order = draws[:, 1].argsort(kind="stable")
        partners = np.empty(len(order), np.int64)
        partners[order] = np.roll(order, -1)
        return shares, partners

    def _draw_sample(self, number: int) -> tuple[float, float]:
        """A sample's share of itself, and its place in the random order."""
        rng = generator(self.seed, RandomStream.MIXUP, number)
        share = float(rng.beta(self.alpha, self.alpha))
        return share, float(rng.random())


def _mixed(values: Tensor, partner_indices: Tensor, shares: np.ndarray) -> Tensor:
    """Shape: values (batch, ...), partner_indices (batch,), shares (batch,) -> that of values."""
    column = torch.from_numpy(shares).to(values.dtype)
    # One share for all values of a sample
    column = column.view(-1, *(1,) * (values.ndim - 1))
    return torch.lerp(values[partner_indices], values, to_device(column, values.device))
