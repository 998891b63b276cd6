"""`data=image_mask`: pictures and their masks, in two folders or by two glob patterns."""

from __future__ import annotations

from collections.abc import Sequence

from medconv.data.case import Dataset
from medconv.data.datasets.folder import folder


def image_mask(images: str, labels: str, class_names: Sequence[str] | None = None) -> Dataset:
    """Pairs from two glob patterns as for `folder`, or from two folders with equal file names.

    Args: class_names: background first; None numbers the classes of the first 20 masks.
    """
    if not images or not labels:
        raise ValueError("data=image_mask needs both data.images and data.labels, as folders or patterns")
    return folder(images, labels, class_names)
