"""Training images in half precision on their way to an accelerator: shared memory, pinned memory, the copy.

For networks that compute in half precision: autocast to bf16 rounds their input eight times as coarsely, that
to fp16 as coarsely. On the accelerator images become fp32 again, before they are augmented.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Sample = dict[str, Any]
Batch = dict[str, Any]

_LARGEST = torch.finfo(torch.float16).max  # 65504
_SMALLEST_NORMAL = torch.finfo(torch.float16).tiny  # 2^-14; smaller values have fewer digits


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
