"""Samples to batches: augmented in the worker, or one whole case."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

Sample = dict[str, Any]
Batch = dict[str, Any]
_ONE_SIZE = ("annotated", "kept")  # in samples of any size, and not augmented


class Augmenting:
    """Collates and augments in the worker; a class, so that `spawn` can pickle it."""

    def __init__(self, augment: Callable[[Batch], Batch]) -> None:
        self.augment = augment

    def __call__(self, samples: list[Sample]) -> Batch:
        image_shapes = {sample["image"].shape for sample in samples}
        if len(image_shapes) == 1:
            return self.augment(default_collate(samples))
        # Samples of different sizes (see `read_size`) stay lists, until augmentation makes them one size.
        batch = self.augment({key: [sample[key] for sample in samples] for key in samples[0]})
        stacked = {key: default_collate(batch[key]) for key in _ONE_SIZE if key in batch}
        return {**batch, **stacked}


def only_item(samples: list[Sample]) -> Sample:
    """The item of a batch of one."""
    (item,) = samples
    return item
