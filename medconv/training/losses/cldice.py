"""Soft clDice: overlap of the centrelines, for vessels, airways and other thin structures."""

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d, relu

from medconv.training.losses.segmentation import sum_over_ranks
from medconv.training.losses.shape_term import ShapeTermLoss, whole_number

_SMOOTH = 1.0  # voxels, as in the authors' definition


class ClDice(ShapeTermLoss):
    """Adds 1 - soft clDice: the harmonic mean of the share of the predicted centreline within the reference
    (topology precision) and of the reference's centreline within the prediction (topology sensitivity).

    The sums run over the batch and all devices, for each class or region; the term is their mean.

    Args:
        weight: of the term.
        iterations: erosions of the soft skeleton; at least half the width of the widest structure, in voxels.
        dice_weight, ce_weight: as of `DiceCrossEntropy`.
    Raises:
        ValueError: iterations that are not a whole number of at least 1, or a weight below 0.
    Source: Shit et al. 2021, arXiv:2003.07311.
    """

    def __init__(
        self, weight: float = 1.0, iterations: int = 5, dice_weight: float = 1.0, ce_weight: float = 1.0
    ) -> None:
        super().__init__(weight, dice_weight, ce_weight)
        self.iterations = whole_number("iterations", iterations, least=1)

    def term(self, probability: Tensor, mask: Tensor) -> Tensor:
        predicted = soft_skeleton(probability, self.iterations)
        with torch.no_grad():
            true = soft_skeleton(mask, self.iterations)
        axes = [0, *range(2, mask.ndim)]
        sums = torch.stack(
            [
                (predicted * mask).sum(axes),
                predicted.sum(axes),
                (true * probability).sum(axes),
                true.sum(axes),
            ]
        )
        sums, _ = sum_over_ranks(sums)
        precision = (sums[0] + _SMOOTH) / (sums[1] + _SMOOTH)
        sensitivity = (sums[2] + _SMOOTH) / (sums[3] + _SMOOTH)
        cldice = 2 * precision * sensitivity / (precision + sensitivity)
        return 1 - cldice.mean()


def soft_skeleton(probability: Tensor, iterations: int) -> Tensor:
    """What openings take away from ever more eroded structures: their centrelines, differentiable.

    What lies outside of the array counts as the voxel at its border.
    Shape: (batch, channels, *spatial) of 0 to 1 -> the same.
    Source: Shit et al. 2021, arXiv:2003.07311; of masks it is Lantuejoul's skeleton.
    """
    skeleton = torch.zeros_like(probability)
    structure = probability
    for _ in range(iterations + 1):
        eroded = _eroded(structure)
        removed = relu(structure - dilated(eroded))
        # a probabilistic union
        skeleton = skeleton + relu(removed - skeleton * removed)
        structure = eroded
    return skeleton


def dilated(values: Tensor) -> Tensor:
    """The largest value of the voxels that share a corner. Shape: (batch, channels, *spatial) -> same."""
    for axis in range(2, values.ndim):
        values = _largest_along(values, axis)
    return values


def _eroded(values: Tensor) -> Tensor:
    """The smallest value of the voxels that share a face. Shape: (batch, channels, *spatial) -> same."""
    largest = _largest_along(-values, 2)
    for axis in range(3, values.ndim):
        largest = torch.maximum(largest, _largest_along(-values, axis))
    return -largest


def _largest_along(values: Tensor, axis: int) -> Tensor:
    """Of each voxel and its two neighbours along an axis."""
    last = values.ndim - 1
    if axis == last:
        swapped = values.transpose(-1, -2).contiguous()
        return _largest_along(swapped, axis - 1).transpose(-1, -2).contiguous()
    num_rows = values.shape[:axis].numel()
    rows = values.reshape(num_rows, values.shape[axis], 1, -1)
    # Later axes are the channels of a channels-last image, where a CPU pools four to seven times as fast.
    # In 2D also for volumes: the backward of `max_pool3d` is random on CUDA.
    images = rows.permute(0, 3, 1, 2)
    pooled = max_pool2d(images, kernel_size=(3, 1), stride=1, padding=(1, 0))
    return pooled.permute(0, 2, 3, 1).reshape(values.shape)
