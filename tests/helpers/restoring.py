"""A label map on the native grid, from all logits of a case at once."""

from collections.abc import Callable, Iterable

import numpy as np
from torch import Tensor

from medconv.data.preprocessing.preprocess import CropInfo, SlabGrid, to_native
from medconv.targets.label_map import LabelMapTargets

_CLASSES = LabelMapTargets.of_classes(["background", "a"])


def restore(
    logits: Tensor, crop_info: CropInfo, decode: Callable[[Iterable[Tensor]], Tensor] = _CLASSES.decode
) -> np.ndarray:
    """Outside the content it is background.

    Shape: (outputs, *spatial) -> (X, Y, Z) int16.
    Args:
        decode: channels of logits, one (*spatial) at a time, to label values (*spatial); default: argmax.
    """
    axis = crop_info.content_shape.index(max(crop_info.content_shape))
    planes_first = logits.movedim(1 + axis, 1)
    grid = SlabGrid(crop_info, axis, planes_first.shape[1])
    content = np.empty(crop_info.content_shape, np.int16)
    for slab in grid.slabs():
        label = decode(grid.channels(planes_first[:, slab.sources], slab))
        np.moveaxis(content, axis, 0)[slab.first : slab.stop] = label.cpu().numpy()
    return to_native(content, crop_info)
