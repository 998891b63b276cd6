"""Adapt pretrained tensors to a network: another number of input channels, 2D kernels in 3D."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medconv import config as configs
from medconv.convs import acs

TO_3D = ("inflate", "acs")
Shape = Sequence[int]


@dataclass(frozen=True)
class Layers:
    """Layers whose size depends on the dataset; dotted names of modules.

    Args: image: layers whose input is the image. head: layers that make the outputs.
    """

    image: frozenset[str] = frozenset()
    head: frozenset[str] = frozenset()


def layers_of(
    model: Mapping[str, Any], more_channels: Mapping[str, Any], more_outputs: Mapping[str, Any]
) -> Layers:
    """Find these layers in any network: build the `model` node with one more channel or one more output.

    The layers whose parameters then have another shape are these.
    """
    return Layers(_changed(model, more_channels), _changed(model, more_outputs))


def _changed(model: Mapping[str, Any], other: Mapping[str, Any]) -> frozenset[str]:
    """Modules with parameters of another size; none if the other network cannot be built."""
    try:
        with torch.random.fork_rng([]), torch.device("meta"):  # no memory, and no change of the random state
            networks = [configs.build(node, "model") for node in (model, other)]
    except Exception:  # a network without such a version may raise anything
        return frozenset()
    own, others = (
        {name: value.shape for name, value in network.named_parameters(remove_duplicate=False)}
        for network in networks
    )
    return frozenset(module_of(name) for name, shape in own.items() if others.get(name, shape) != shape)


def module_of(name: str) -> str:
    """The layer of a parameter, also if a parametrization computes the weight from it."""
    layer, computed, _ = name.partition(".parametrizations.")
    return layer if computed else name.rpartition(".")[0]


def within(name: str, modules: frozenset[str]) -> bool:
    """Whether a parameter belongs to one of these modules, or to a module that replaced one."""
    layer = module_of(name)
    return any(layer == module or (module and layer.startswith(f"{module}.")) for module in modules)


def to_channels(value: Tensor, shape: Shape, num_channels: int) -> Tensor | None:
    """Weights of an input layer for another number of channels, all equal: W' = sum of W / num_channels.

    An image with equal channels gives the same response as before. For one channel W' is the sum, so a grey
    image gives the response that it gave when copied to all channels.
    Returns: None: the shapes differ elsewhere.
    """
    if value.ndim != len(shape):
        return None
    differs = [axis for axis, (old, new) in enumerate(zip(value.shape, shape, strict=True)) if old != new]
    if len(differs) != 1 or differs[0] == 0 or shape[differs[0]] != num_channels:
        return None
    return (value.double().sum(differs[0], keepdim=True) / num_channels).to(value.dtype).expand(*shape)


def new_axis(shapes: Sequence[tuple[Shape, Shape]], slice_axis: Any = None) -> int:
    """The spatial axis (0 to 2) that 2D kernels lack: the one for which most kernels fit, for all layers.

    Args: shapes: pairs of a 2D and a 3D kernel shape. slice_axis: of a 2D checkpoint of ours; the choice if
        several fit equally well.
    """

    def fits(axis: int) -> int:
        return sum(tuple(flat[2:]) == _without(solid, axis) for flat, solid in shapes)

    first: list[int] = [slice_axis] if slice_axis in (0, 1, 2) else []
    return max([*first, 2, 1, 0], key=fits)


def inflate_2d(value: Tensor, layer: Any, how: str, axis: int) -> Tensor | None:
    """A 2D layer's kernel for a 3D one.

    Shape: value (out, in, k, k) -> (out, in, k, k, k), of a transposed convolution (in, out, ...).
    Args:
        how: `inflate` repeats it along the new axis and divides by the taps that a voxel sees, so that an
            image that is constant along that axis gives what the 2D layer gave; `acs` puts it, as it is, into
            axial, coronal and sagittal planes, a third of the outputs each, and inflates what has no odd
            cubic kernel.
        axis: spatial, the new one.
    Returns: None: the other axes differ.
    Source: Carreira & Zisserman 2017, arXiv:1705.07750; Yang et al. 2021, arXiv:1911.10477.
    """
    size: tuple[int, ...] = tuple(layer.kernel_size)
    if tuple(value.shape[2:]) != _without((0, 0, *size), axis):
        return None
    if how == "acs" and isinstance(layer, nn.Conv3d) and len(set(size)) == 1 and size[0] % 2 == 1:
        return _planes(value, size[0])
    taps = size[axis]
    taps_per_voxel: float = max(1.0, taps / layer.stride[axis]) if layer.transposed else taps
    return value.unsqueeze(2 + axis).repeat_interleave(taps, 2 + axis) / taps_per_voxel


def _planes(value: Tensor, size: int) -> Tensor:
    """The kernel of `conv=acs`."""
    with torch.random.fork_rng([]):
        conv: Any = acs(nn.Conv3d(value.shape[1], len(value), size, bias=False), weight_2d=value.float())
    weight: Tensor = conv.weight
    return weight.detach().to(value.dtype)


def _without(shape: Shape, axis: int) -> tuple[int, ...]:
    spatial = list(shape[2:])
    return tuple(spatial[:axis] + spatial[axis + 1 :])
