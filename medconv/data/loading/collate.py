"""Samples to batches: augmented in the worker, rounded to half precision, or one whole case.

Half precision is for training images on their way to an accelerator (shared memory, pinned memory, the copy)
and networks that compute in it: autocast to bf16 rounds their input eight times as coarsely, that to fp16 as
coarsely. On the accelerator images become fp32 again, before they are augmented.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import default_collate

from medconv.data.loading.patch import Batch, Sample

_ONE_SIZE = ("annotated", "kept")  # in samples of any size, and not augmented

_LARGEST = torch.finfo(torch.float16).max  # 65504
_SMALLEST_NORMAL = torch.finfo(torch.float16).tiny  # 2^-14; smaller values have fewer digits


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


class HalfPrecision:
    """Collates samples whose images are rounded to fp16; a class, so that `spawn` can pickle it.

    Args:
        collate: of samples; their images (channels, *spatial) all have one type.
    """

    def __init__(self, collate: Callable[[list[Sample]], Batch]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Sample]) -> Batch:
        images = [sample["image"] for sample in samples]
        halves = [image.half() if fits(image) else image for image in images]
        if any(half.dtype != torch.float16 for half in halves):
            # A sample must not depend on the batch that it is in, so those that fit are rounded here as well
            halves = [half.to(image.dtype) for half, image in zip(halves, images, strict=True)]
        return self.collate([{**sample, "image": half} for sample, half in zip(samples, halves, strict=True)])


def fits(image: Tensor) -> bool:
    """Whether rounding to fp16 changes no value by more than 2^-11 of the largest; false with NaN."""
    if image.numel() == 0:
        return True
    low, high = torch.aminmax(image)
    largest = max(-float(low), float(high))
    return largest == 0 or _SMALLEST_NORMAL <= largest <= _LARGEST
