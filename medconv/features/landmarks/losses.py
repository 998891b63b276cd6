"""The loss of heatmaps."""

import math

from torch import Tensor, nn
from torch.nn import functional as F

_SMALLEST_SHARE = 1e-3  # of a patch that heatmaps take; patches without points count as if they had some


class HeatmapLoss(nn.Module):
    """Quality focal loss: cross-entropy with heatmaps, weighted by a power of the error.

    The many voxels far from any point, which are right already, hardly count. The mean over voxels is divided
    by that of the heatmaps.

    Shape: logits and heatmaps (batch, names, *spatial) -> scalar, computed in fp32.
    Args: power: 0 is the cross-entropy; between 0 and 1 its gradient is infinite where a voxel is right.
    Raises: ValueError: another power than 0, or 1 and more.
    Source: Li et al. 2020, arXiv:2006.04388.
    """

    kinds = ("landmarks",)

    def __init__(self, power: float = 2.0) -> None:
        super().__init__()
        if type(power) not in (int, float) or not (power == 0 or 1 <= power < math.inf):
            raise ValueError(f"power must be 0, or a number of 1 or more, got {power}")
        self.power = float(power)

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        outputs = outputs.float()
        target = target.float().clamp(0, 1)  # interpolation may overshoot
        error = (outputs.sigmoid() - target).abs().pow(self.power)
        loss = error * F.binary_cross_entropy_with_logits(outputs, target, reduction="none")
        return loss.mean() / target.mean().clamp(min=_SMALLEST_SHARE)
