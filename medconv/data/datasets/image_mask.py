"""What layouts of pictures share: pairs of pictures and masks, the channels of files, and ids for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from medconv.data.case import Dataset
from medconv.data.datasets.common import modalities_of
from medconv.data.datasets.folder import folder


def image_mask(images: str, labels: str, class_names: Sequence[str] | None = None) -> Dataset:
    """Pictures and their masks: two glob patterns as for `folder`, or two folders in which a pair has one
    stem.

    Args: class_names: background first; None numbers as many classes as the first 20 masks show.
    """
    if not images or not labels:
        raise ValueError(
            "data=image_mask needs both data.images and data.labels, as folders or as glob patterns"
        )
    found = folder(images, labels, class_names)
    files = [case.images[0] for case in found.cases if case.images]
    return replace(found, modalities=modalities_of(files, "MRI"))
