"""Channels that a training sample lacks: those that its case lacks, and others that are dropped by chance."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medconv.data.random_streams import RandomStream, generator
from medconv.targets.masking import over_voxels
from medconv.utils.errors import ArgumentError


@dataclass(frozen=True)
class ChannelDropout:
    """Makes a network that can do without some channels: it sees samples in which these are 0.

    Args:
        probability: with which each channel is dropped; at least one that the case has is kept.
        num_channels: of the network.
        missing: case id to the channels that it lacks, where it lacks some.
        seed: of the run.
    Raises:
        ArgumentError: a probability that is not from 0 to below 1.
    Source: modality dropout, Neverova et al. 2015, arXiv:1501.00102.
    """

    probability: float
    num_channels: int
    missing: Mapping[str, tuple[int, ...]]
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1:
            raise ArgumentError("channel_dropout", f" must be from 0 to below 1, got {self.probability}")

    def kept(self, case_id: str, sample: int) -> Tensor:
        """Which channels a sample shows; the same for the same seed. Shape: (channels,) bool."""
        rng = generator(self.seed, RandomStream.CHANNELS, sample)
        missing = self.missing.get(case_id, ())
        present = [channel for channel in range(self.num_channels) if channel not in missing]
        # An image of zeros alone would teach nothing
        spared = present[rng.integers(len(present))]
        is_dropped = rng.random(self.num_channels) < self.probability
        is_dropped[list(missing)] = True
        if is_dropped.all():
            is_dropped[spared] = False
        return torch.from_numpy(~is_dropped)


def without_dropped(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch whose images are 0 in channels that are not `kept`; after augmentation, which adds to zeros.

    Shape: image (batch, channels, *spatial), kept (batch, channels) bool.
    """
    image = batch["image"]
    kept = over_voxels(batch["kept"], image)
    return {**batch, "image": torch.where(kept, image, 0)}
