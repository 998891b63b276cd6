"""`conv=acs`: 2D kernels in a 3D convolution, a third of the outputs for each plane."""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from medconv.convs.linear import LinearPrior
from medconv.convs.parametrization import Conv, UnsuitableLayerError, for_volumes, install


@for_volumes
def acs(conv: Conv, *, weight_2d: Tensor | None = None, init_from_weights: bool = False) -> nn.Module:
    """2D kernels in a 3D convolution: a third of the outputs for each of axial, coronal and sagittal planes.

    One dense convolution whose kernels are zero outside of their plane: faster than the three thin
    convolutions of the paper where the image is large, slower in deep stages (docs/benchmarks.md).

    Args:
        conv: an `nn.Conv3d` with one odd kernel size for all axes, changed in place.
        weight_2d: the weight (out, in, k, k) of a trained 2D convolution to start from.
        init_from_weights: project the present 3D weight onto the planes.
    Raises:
        ValueError: not 3D, kernel axes that differ or are even, `weight_2d` of the wrong shape.
    Weights: out * in * k^2, against out * in * k^3.
    Source: Yang et al. 2021, arXiv:1911.10477.
    """
    size = conv.kernel_size
    if len(size) != 3:
        raise ValueError(
            f"conv=acs splits 2D kernels over the planes of 3D images, got {type(conv).__name__}"
        )
    if len(set(size)) > 1 or size[0] % 2 == 0:
        raise UnsuitableLayerError(
            f"kernel_size must be one odd number along all axes for conv=acs, got {size}", "uneven kernel"
        )
    num_taps = prod(size)
    taps = torch.arange(num_taps).view(size)
    centre = size[0] // 2
    # Planes through the centre, of axes (x, y, z): axial across z, coronal across y, sagittal across x.
    planes = [taps.select(across, centre).flatten() for across in (2, 1, 0)]
    all_taps = torch.eye(num_taps)
    mixtures = torch.stack([all_taps[:, plane] for plane in planes])
    # thirds of the outputs, also where 3 does not divide them
    kind = torch.arange(conv.out_channels) * 3 // conv.out_channels
    install(conv, LinearPrior(size, mixtures, kind), init_from_weights)
    if weight_2d is not None:
        load_plane_weight(conv, weight_2d)
    return conv


def load_plane_weight(conv: Any, weight_2d: Tensor) -> None:
    """Give an `acs` convolution the weight (out, in, k, k) of a 2D one.

    Raises:
        ValueError: wrong shape.
    """
    original = conv.get_parameter("parametrizations.weight.original")
    out_channels, _, in_channels = original.shape
    expected = (out_channels, in_channels, *conv.kernel_size[:2])
    if tuple(weight_2d.shape) != expected:
        raise ValueError(
            f"weight_2d must have shape (out, in, k, k) = {expected}, got {tuple(weight_2d.shape)}"
        )
    with torch.no_grad():
        original.copy_(weight_2d.flatten(2).transpose(1, 2))
