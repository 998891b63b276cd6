"""Boundary loss: false voxels count by their distance from the reference's surface."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt
from torch import Tensor

from medconv.training.losses.arguments import LossArgumentError
from medconv.training.losses.shape_term import ShapeTermLoss
from medconv.utils.hardware import to_device


class Boundary(ShapeTermLoss):
    """Adds the mean of (probability - mask) times the signed distance from the reference's surface.

    The distance is positive outside and negative inside, so that the term is never negative, and 0 if
    prediction and reference are equal; it is a share of the patch's diagonal. A class without a surface in a
    patch, absent or all over, has no term there. Distances are measured on the CPU: a GPU waits for them.

    Args:
        weight: of the term.
        spacing_mm: of the axes; None: voxels are cubes. Coarser heads have the same ratio of axes.
        dice_weight, ce_weight: as of `DiceCrossEntropy`.
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
    ) -> None:
        super().__init__(weight, dice_weight, ce_weight)
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
