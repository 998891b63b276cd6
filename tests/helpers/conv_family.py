"""Every convolution of medconv.convs as tests build it, by the name of its `conv` option."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from medconv.convs import (
    acs,
    ball,
    basis,
    bottleneck,
    masked,
    plain,
    se,
    separable,
    smooth,
    spacing,
    swap_convs,
    transform,
)
from medconv.convs.factorised import product_weight
from medconv.convs.share import shared
from medconv.features.equivariance.equivariant import Equivariant

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
COARSE = (1.0, 0.5, 2.0)  # mm; the first numbers are used

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "none": plain,
    "transform": transform,
    "basis": basis,
    "ball": ball,
    "spacing": spacing,
    "smooth": partial(smooth, throughout=True),
    "share": partial(shared, conv=partial(smooth, throughout=True), share=0.5),
    "masked": masked,
    "bottleneck": partial(bottleneck, channels=(2, 3)),
    "separable": separable,
    "acs": acs,
    "se": partial(se, reduction=2),
}
ALL = [*LAYERS, "mirror"]
NOT_LINEAR = ["se"]  # layers that are no linear convolution, so no dense kernel equals them
WEIGHT_PRIORS = ["transform", "basis", "ball", "spacing", "smooth", "share", "masked", "acs"]
FACTORISED = ["bottleneck", "separable"]
UNGROUPED = ["transform", "share", "bottleneck", "separable"]  # what has no meaning for a grouped convolution
IN_MM = ["transform", "basis", "ball", "spacing", "smooth", "share"]


def dims_of(name: str) -> list[int]:
    return [3] if name == "acs" else [2, 3]


CASES = [(name, dims) for name in ALL for dims in dims_of(name)]


def build(name: str, dims: int = 2, seed: int = 0, conv: nn.Module | None = None, **arguments) -> nn.Module:
    """One convolution of 4 to 6 channels, or, for `mirror`, a network of 4 to 6 channels."""
    torch.manual_seed(seed)
    if name == "mirror":
        return mirror_network(dims)
    conv = CONV[dims](4, 6, 3, padding=1) if conv is None else conv
    if name in IN_MM:
        arguments.setdefault("spacing_mm", COARSE[: len(conv.kernel_size)])
    return LAYERS[name](conv, **arguments)


def mirror_network(dims: int) -> nn.Module:
    """Lifting, regular and head layers, and a transposed one, with weights for every path."""
    conv, up = CONV[dims], {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
    network = nn.Sequential(
        conv(4, 4, 3, padding=1),
        nn.Tanh(),
        conv(4, 8, 2, 2),
        nn.Tanh(),
        up(8, 4, 2, 2),
        nn.Tanh(),
        conv(4, 6, 3, padding=1),
    )
    swap_convs(network, Equivariant((0, dims - 1)), example=torch.zeros(1, 4, *[4] * dims))
    return network


def image(dims: int, batch: int = 2, size: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 4, *[size] * dims, dtype=dtype, generator=torch.Generator().manual_seed(7))


def dense_weight(name: str, module: nn.Module) -> Tensor:
    """The kernel of the one convolution that a linear member of the family amounts to."""
    return product_weight(module) if name in FACTORISED else module.weight.detach()
