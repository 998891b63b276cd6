"""Losses of shape: Dice and cross-entropy plus a term about surface, centreline or components."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from medconv.training.losses.fit import LossArgumentError
from medconv.training.losses.segmentation import DiceCrossEntropy, foreground, sum_over_ranks
from medconv.utils.hardware import to_device

_SMOOTH = 1.0  # voxels, as in the authors' definition


class ShapeTermLoss(nn.Module, ABC):
    """`DiceCrossEntropy` plus `weight` times the `term` of a subclass, which looks at neighbouring voxels.

    Shape: as of `DiceCrossEntropy`. Voxels without a label are background to the term, in the prediction and
    in the reference, and have a gradient of 0.

    Args:
        weight: of the term.
        dice_weight, ce_weight, batch_dice: as of `DiceCrossEntropy`.
    Raises:
        ValueError: a weight that is not a number of 0 or more.
    """

    kinds = ("label_map", "regions")

    def __init__(
        self, weight: float, dice_weight: float = 1.0, ce_weight: float = 1.0, batch_dice: bool = True
    ) -> None:
        super().__init__()
        if type(weight) not in (int, float) or not 0 <= weight < math.inf:
            raise ValueError(f"weight must be a number of 0 or more, got {weight}")
        self.weight = float(weight)
        self.dice_cross_entropy = DiceCrossEntropy(dice_weight, ce_weight, batch_dice=batch_dice)

    def forward(self, logits: Tensor, reference: Tensor, labelled: Tensor | None = None) -> Tensor:
        dice_cross_entropy: Tensor = self.dice_cross_entropy(logits, reference, labelled)
        if not self.weight:
            return dice_cross_entropy
        probability, mask = foreground(logits, reference)
        if labelled is not None:
            probability = torch.where(labelled, probability, 0)
            mask = torch.where(labelled, mask, 0)
        with torch.autocast(logits.device.type, enabled=False):
            return dice_cross_entropy + self.weight * self.term(probability, mask)

    @abstractmethod
    def term(self, probability: Tensor, mask: Tensor) -> Tensor:
        """Shape: probability and mask (batch, foreground, *spatial), fp32 -> scalar."""


def whole_number(name: str, value: int, least: int) -> int:
    """Raises: ValueError: not a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")
    return value


class Boundary(ShapeTermLoss):
    """Adds the mean of (probability - mask) times the signed distance from the reference's surface.

    The distance is positive outside and negative inside, so that the term is never negative, and 0 if
    prediction and reference are equal; it is a share of the patch's diagonal. A class without a surface in a
    patch, absent or all over, has no term there. Distances are measured on the CPU: a GPU waits for them.

    Args:
        weight: of the term.
        spacing_mm: of the axes; None: voxels are cubes. Coarser heads are measured by it, too, even
            where their strides differ between the axes.
        dice_weight, ce_weight, batch_dice: as of `DiceCrossEntropy`.
    Raises:
        ValueError: a spacing that is not positive numbers.
        LossArgumentError: in `forward`: a spacing of other axes.
    Source: Kervadec et al. 2019, arXiv:1812.07032; there without the mask, which changes no gradient.
    """

    def __init__(
        self,
        weight: float = 1.0,
        spacing_mm: Sequence[float] | None = None,
        dice_weight: float = 1.0,
        ce_weight: float = 1.0,
        batch_dice: bool = True,
    ) -> None:
        super().__init__(weight, dice_weight, ce_weight, batch_dice)
        if spacing_mm is not None and not all(0 < mm < math.inf for mm in spacing_mm):
            raise ValueError(f"spacing_mm must be positive numbers, got {spacing_mm}")
        self.spacing_mm = spacing_mm

    def term(self, probability: Tensor, mask: Tensor) -> Tensor:
        shares = self._distances(mask.bool().cpu().numpy())
        distance = to_device(torch.from_numpy(shares), probability.device)
        return (distance * (probability - mask)).mean()

    def _distances(self, masks: np.ndarray) -> np.ndarray:
        """Signed, as a share of the diagonal. Shape: (batch, foreground, *spatial) -> same, float32."""
        size = masks.shape[2:]
        spacing_mm = self.spacing_mm or (1.0,) * len(size)
        if len(spacing_mm) != len(size):
            raise LossArgumentError(f"spacing_mm must be {len(size)} numbers, got {len(spacing_mm)}")
        diagonal_mm = math.hypot(*np.multiply(size, spacing_mm))
        distances = np.zeros(masks.shape, np.float32)
        for sample, output in np.ndindex(masks.shape[:2]):
            mask = masks[sample, output]
            has_surface = mask.any() and not mask.all()
            if has_surface:
                outside_mm = distance_transform_edt(~mask, spacing_mm)
                inside_mm = distance_transform_edt(mask, spacing_mm)
                distances[sample, output] = (outside_mm - inside_mm) / diagonal_mm
        return distances


class ClDice(ShapeTermLoss):
    """Adds 1 - soft clDice: the harmonic mean of the share of the predicted centreline within the reference
    (topology precision) and of the reference's centreline within the prediction (topology sensitivity).

    The sums run over the batch and all devices, for each class or region; the term is their mean.

    Args:
        weight: of the term.
        iterations: erosions of the soft skeleton; at least half the width of the widest structure, in voxels.
        dice_weight, ce_weight, batch_dice: as of `DiceCrossEntropy`.
    Raises:
        ValueError: iterations that are not a whole number of at least 1, or a weight below 0.
    Source: Shit et al. 2021, arXiv:2003.07311.
    """

    def __init__(
        self,
        weight: float = 1.0,
        iterations: int = 5,
        dice_weight: float = 1.0,
        ce_weight: float = 1.0,
        batch_dice: bool = True,
    ) -> None:
        super().__init__(weight, dice_weight, ce_weight, batch_dice)
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
    """The largest value of each voxel and its two neighbours along an axis."""
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


class SkeletonRecall(ShapeTermLoss):
    """Adds 1 - the soft recall of a tube around the reference's centreline.

    Only the reference has a skeleton, so no gradient passes through one: less memory and time than `ClDice`.
    It is that of the augmented label, on the device, and of each class or region. The sums run over the
    batch and all devices; classes without a voxel in it are left out.

    Args:
        weight: of the term.
        iterations: erosions of the skeleton; at least half the width of the widest structure, in voxels.
        tube_radius: in voxels, within the structure; it makes the term easier to minimise.
        dice_weight, ce_weight, batch_dice: as of `DiceCrossEntropy`.
    Raises:
        ValueError: iterations below 1, a radius or a weight below 0.
    Source: Kirchhoff et al. 2024, arXiv:2404.03010, where the skeleton is thinned on the CPU.
    """

    def __init__(
        self,
        weight: float = 1.0,
        iterations: int = 5,
        tube_radius: int = 2,
        dice_weight: float = 1.0,
        ce_weight: float = 1.0,
        batch_dice: bool = True,
    ) -> None:
        super().__init__(weight, dice_weight, ce_weight, batch_dice)
        self.iterations = whole_number("iterations", iterations, least=1)
        self.tube_radius = whole_number("tube_radius", tube_radius, least=0)

    def term(self, probability: Tensor, mask: Tensor) -> Tensor:
        tube = self.tube(mask)
        axes = [0, *range(2, mask.ndim)]
        sums, _ = sum_over_ranks(torch.stack([(tube * probability).sum(axes), tube.sum(axes)]))
        is_present = sums[1] > 0
        recall = (sums[0] + _SMOOTH) / (sums[1] + _SMOOTH)
        missed = torch.where(is_present, 1 - recall, 0)
        return missed.sum() / is_present.sum().clamp(min=1)

    @torch.no_grad()
    def tube(self, mask: Tensor) -> Tensor:
        """The voxels of a mask near its centreline. Shape: (batch, foreground, *spatial) -> same, 0 and 1."""
        tube = soft_skeleton(mask, self.iterations)
        for _ in range(self.tube_radius):
            tube = dilated(tube)
        return tube * mask
