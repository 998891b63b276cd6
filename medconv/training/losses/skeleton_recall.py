"""Skeleton recall: how much of the reference's centreline is found, for thin structures."""

import torch
from torch import Tensor

from medconv.training.losses.cldice import dilated, soft_skeleton
from medconv.training.losses.segmentation import sum_over_ranks
from medconv.training.losses.shape_term import ShapeTermLoss, whole_number

_SMOOTH = 1.0  # voxels


class SkeletonRecall(ShapeTermLoss):
    """Adds 1 - the soft recall of a tube around the reference's centreline.

    Only the reference has a skeleton, so no gradient passes through one: less memory and time than `ClDice`.
    It is that of the augmented label, on the device, and of each class or region. The sums run over the
    batch and all devices; classes without a voxel in it are left out.

    Args:
        weight: of the term.
        iterations: erosions of the skeleton; at least half the width of the widest structure, in voxels.
        tube_radius: in voxels, within the structure; it makes the term easier to minimise.
        dice_weight, ce_weight: as of `DiceCrossEntropy`.
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
    ) -> None:
        super().__init__(weight, dice_weight, ce_weight)
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
