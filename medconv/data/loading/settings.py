"""How training samples are made, and the processes that make batches of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from medconv.data.augmentation.sample_transforms import SampleTransforms
from medconv.data.loading.channel_dropout import ChannelDropout
from medconv.data.loading.patch_shape import PatchShape
from medconv.data.loading.samplers.base import Sampler
from medconv.utils.errors import Argument, ArgumentError

Batch = dict[str, Any]


@dataclass(frozen=True)
class TrainingSamples:
    """How training samples are made.

    Args:
        channel_dropout: which channels they lack; None: none.
        sampler: draws the case and the corner of each sample; its indices are those of the training cases.
        patch: not used for whole images with values.
        augment: applied to training batches: on the device if it is an accelerator, else in the workers. A
            `SampleTransforms` is applied to each sample, always in the workers.
    """

    sampler: Sampler
    patch: PatchShape
    augment: Callable[[Batch], Batch] | SampleTransforms
    seed: int
    channel_dropout: ChannelDropout | None = None


@dataclass(frozen=True)
class LoaderSettings:
    """Batches, and the processes that make them.

    Args:
        batch_size: per device.
        samples_per_epoch: over all devices.
        num_workers: loader processes per device; None: half of the cores, shared by the devices, at most 8.
        prefetch_factor: batches that each worker keeps ready.
        persistent_workers: keep workers between epochs; None: yes if there are workers.
    Raises:
        ArgumentError: a number out of range, or persistent workers without workers.
    """

    batch_size: int
    samples_per_epoch: int
    num_workers: int | None = None
    prefetch_factor: int = 2
    persistent_workers: bool | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "samples_per_epoch", "prefetch_factor"):
            number = getattr(self, name)
            if number < 1:
                raise ArgumentError(name, f" must be at least 1, got {number}")
        if self.num_workers is not None and self.num_workers < 0:
            raise ArgumentError("num_workers", f" must be 0 or more, got {self.num_workers}")
        if self.num_workers == 0 and self.persistent_workers:
            raise ArgumentError(
                "persistent_workers", "=true needs workers, got ", Argument("num_workers"), "=0"
            )
