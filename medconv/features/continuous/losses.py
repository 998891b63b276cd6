"""The loss of images: absolute error, and structural similarity."""

from torch import Tensor, nn

from medconv.features.continuous.metrics import ssim_of_windows

_SMALLEST_RANGE = 1e-6


class ImageLoss(nn.Module):
    """Mean absolute error, and 1 - SSIM.

    Shape: outputs and target (batch, 1, *spatial) -> scalar, computed in fp32.
    Args:
        ssim: share of 1 - SSIM, 0 to 1; the rest is that of the absolute error. Its range of values is that
            of the batch.
    Raises:
        ValueError: a share that is none.
    Source: Zhao et al. 2017, doi:10.1109/TCI.2016.2644865.
    """

    kinds = ("continuous",)

    def __init__(self, ssim: float = 0.0) -> None:
        super().__init__()
        if type(ssim) not in (int, float) or not 0 <= ssim <= 1:
            raise ValueError(f"ssim must be a number from 0 to 1, got {ssim}")
        self.ssim = float(ssim)

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        outputs = outputs.float()
        target = target.float()
        error = (outputs - target).abs().mean()
        if not self.ssim:
            return error
        data_range = (target.amax() - target.amin()).clamp(min=_SMALLEST_RANGE)
        # A constant shift changes no structure, and SSIM is of values that are not negative
        low = target.amin()
        similarity = ssim_of_windows(outputs - low, target - low, data_range).mean()
        return (1 - self.ssim) * error + self.ssim * (1 - similarity)
