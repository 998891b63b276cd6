"""Makes a tensor of a file fit the one of the network whose place it may take, or says why it does not.

It may be for another number of input channels, for 2D, or for other classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medconv import config as configs
from medconv.convs import acs
from medconv.convs.parametrization import CONVS, TRANSPOSED

TO_3D = ("inflate", "acs")
Shape = Sequence[int]


@dataclass(frozen=True)
class Layers:
    """Layers whose size depends on the dataset; dotted names of modules.

    Args:
        image: layers whose input is the image.
        head: layers that make the outputs.
        kernels: names of weights of convolutions, before any of them is swapped.
    """

    image: frozenset[str] = frozenset()
    head: frozenset[str] = frozenset()
    kernels: frozenset[str] = frozenset()


def layers_of(
    model: Mapping[str, Any], more_channels: Mapping[str, Any], more_outputs: Mapping[str, Any]
) -> Layers:
    """Find the layers of `Layers` in any network: those whose parameters change their shape.

    Args:
        model: the `model` node.
        more_channels: the node with one more input channel.
        more_outputs: the node with one more output.
    """
    return Layers(
        image=_resized_modules(model, more_channels),
        head=_resized_modules(model, more_outputs),
        kernels=frozenset(name for name, shape in (_shapes(model) or {}).items() if len(shape) > 2),
    )


def _resized_modules(model: Mapping[str, Any], variant: Mapping[str, Any]) -> frozenset[str]:
    """Modules with parameters of another size; none if the variant cannot be built."""
    shapes, variant_shapes = _shapes(model), _shapes(variant)
    if shapes is None or variant_shapes is None:
        return frozenset()
    resized = set()
    for name, shape in shapes.items():
        if variant_shapes.get(name, shape) != shape:
            resized.add(module_of(name))
    return frozenset(resized)


def _shapes(model: Mapping[str, Any]) -> dict[str, torch.Size] | None:
    """The sizes of a network's parameters, before its convolutions are swapped; None: it cannot be built."""
    for device in ("meta", "cpu"):  # without memory, unless the network reads a tensor as it is built
        try:
            with torch.random.fork_rng([]), torch.device(device):  # no change of the random state
                network = configs.build(model, "model")
            parameters = network.named_parameters(remove_duplicate=False)
            return {name: parameter.shape for name, parameter in parameters}
        except Exception:  # a network without such a version may raise anything
            continue
    return None


def module_of(name: str) -> str:
    """The layer of a parameter, also if a parametrization computes the weight from it."""
    layer, computed, _ = name.partition(".parametrizations.")
    return layer if computed else name.rpartition(".")[0]


def within(name: str, modules: frozenset[str]) -> bool:
    """Whether a parameter belongs to one of these modules, or to a module that replaced one."""
    layer = module_of(name)
    for module in modules:
        # "": the network itself, which is one layer
        is_inside = module != "" and layer.startswith(f"{module}.")
        if layer == module or is_inside:
            return True
    return False


def to_channels(value: Tensor, shape: Shape, num_channels: int) -> Tensor | None:
    """Weights of an input layer for another number of channels, all equal: W' = sum of W / num_channels.

    An image with equal channels gives the same response as before. For one channel W' is the sum, so a grey
    image gives the response that it gave when copied to all channels.

    Args:
        value: of the file.
        shape: of the network's weight.
        num_channels: of the image.
    Returns:
        The weight; None: the shapes differ elsewhere.
    """
    if value.ndim != len(shape):
        return None
    differing_axes = [axis for axis in range(value.ndim) if value.shape[axis] != shape[axis]]
    if len(differing_axes) != 1:
        return None
    channel_axis = differing_axes[0]
    if channel_axis == 0 or shape[channel_axis] != num_channels:  # axis 0: outputs, or inputs if transposed
        return None
    # in float64, since a sum of rounded numbers would be rounded again
    mean = value.double().sum(channel_axis, keepdim=True) / num_channels
    return mean.to(value.dtype).expand(*shape)


def new_axis(shapes: Sequence[tuple[Shape, Shape]], slice_axis: Any) -> int:
    """The spatial axis (0 to 2) that 2D kernels lack: the one for which most kernels fit, for all layers.

    Args:
        shapes: pairs of a 2D and a 3D kernel shape.
        slice_axis: of a 2D checkpoint of ours; the choice if several fit equally well.
    """

    def matching_kernels(axis: int) -> int:
        matches = 0
        for shape_2d, shape_3d in shapes:
            matches += tuple(shape_2d[2:]) == _without(shape_3d, axis)
        return matches

    # `max` takes the first of equally good ones; slices are usually stored along the last axis.
    candidates = [2, 1, 0]
    if slice_axis in (0, 1, 2):
        candidates.insert(0, slice_axis)
    return max(candidates, key=matching_kernels)


def inflate_2d(value: Tensor, layer: Any, how: str, axis: int) -> Tensor | None:
    """A 2D layer's kernel for a 3D one.

    Shape:
        value (out, in, k, k) -> (out, in, k, k, k), of a transposed convolution (in, out, ...).
    Args:
        how: `inflate` repeats it along the new axis and divides by the taps that a voxel sees, so that an
            image that is constant along that axis gives what the 2D layer gave; `acs` puts it, as it is, into
            axial, coronal and sagittal planes, a third of the outputs each, and inflates what has no odd
            cubic kernel.
        axis: spatial, the new one.
    Returns:
        The kernel; None: the other axes differ.
    Source: Carreira & Zisserman 2017, arXiv:1705.07750; Yang et al. 2021, arXiv:1911.10477.
    """
    kernel_size: tuple[int, ...] = tuple(layer.kernel_size)
    if tuple(value.shape[2:]) != _without((0, 0, *kernel_size), axis):
        return None
    is_odd_cube = len(set(kernel_size)) == 1 and kernel_size[0] % 2 == 1
    if how == "acs" and isinstance(layer, nn.Conv3d) and is_odd_cube:
        return _planes(value, kernel_size[0])
    taps = kernel_size[axis]
    taps_per_voxel: float = taps
    if layer.transposed:  # each output voxel is reached by one tap in `stride`
        taps_per_voxel = max(1.0, taps / layer.stride[axis])
    repeated = value.unsqueeze(2 + axis).repeat_interleave(taps, 2 + axis)
    return repeated / taps_per_voxel


def _planes(value: Tensor, size: int) -> Tensor:
    """The kernel of `conv=acs`."""
    out_channels, in_channels = value.shape[:2]
    with torch.random.fork_rng([]):  # the new convolution draws weights, which are replaced
        conv = nn.Conv3d(in_channels, out_channels, size, bias=False)
        converted: Any = acs(conv, weight_2d=value.float())
    weight: Tensor = converted.weight
    return weight.detach().to(value.dtype)


def _without(shape: Shape, axis: int) -> tuple[int, ...]:
    """The spatial sizes of a kernel's shape, but for one axis."""
    spatial = list(shape[2:])
    del spatial[axis]
    return tuple(spatial)


@dataclass(frozen=True)
class Pair:
    """A tensor of the file and the one of the network whose place it may take."""

    file: Tensor
    network: Tensor

    @property
    def is_2d_to_3d(self) -> bool:
        """By the number of axes; a convolution's kernel has two for its channels."""
        return (self.file.ndim, self.network.ndim) == (4, 5)


Pairs = Mapping[str, Pair]  # by name in the network


@dataclass(frozen=True)
class Fit:
    """Makes the tensors of one file fit one network.

    Args:
        axis: the spatial axis that 2D kernels of the file lack.
        has_other_classes: the file's network predicts something else than this one.
        channel_order: as of `checkpoint_io.channel_order`.
    """

    network: nn.Module
    num_channels: int
    layers: Layers
    inflate_2d: str | None
    axis: int
    has_other_classes: bool
    channel_order: Sequence[int] | None = None

    def __call__(self, name: str, pair: Pair) -> tuple[Tensor | None, str]:
        """What to load and how it was changed, or None and the reason."""
        if self.has_other_classes and within(name, self.layers.head):
            return None, "head of other classes"
        # first to 3D, since a file of 2D images may have other channels, too
        value = pair.file
        shape = tuple(pair.network.shape)
        changes: list[str] = []
        inflated = self._inflated(name, pair)
        if inflated is not None:
            value = inflated
            changes.append(f"2D to 3D by {self.inflate_2d}, axis {self.axis}")
        if self.channel_order and value.ndim > 1 and within(name, self.layers.image):
            in_order = self._in_order(name, value, self.channel_order)
            changes += [] if in_order is value else ["channels by name"]
            value = in_order
        if value.shape != shape and within(name, self.layers.image):
            adapted = to_channels(value, shape, self.num_channels)
            if adapted is not None:
                value = adapted
                changes.append("other input channels")
        file_shape = tuple(pair.file.shape)
        if value.shape != shape:
            return None, f"{file_shape} in the file, here {shape}"
        if value.is_floating_point() != pair.network.is_floating_point() or value.is_complex():
            return None, f"{value.dtype} in the file, here {pair.network.dtype}"
        return value, f"{file_shape} to {shape}: {', '.join(changes)}" if changes else ""

    def _in_order(self, name: str, value: Tensor, order: Sequence[int]) -> Tensor:
        """A tensor of an input layer with the channels in the order of the image's.

        Raises: ConfigError: it is neither a kernel (out, in, ...) nor what one is computed from (..., in).
        """
        layer = module_of(name)
        if f"{layer}.parametrizations.weight.0." in name:  # fixed, such as filters
            return value
        axis = {f"{layer}.weight": 1, f"{layer}.parametrizations.weight.original": -1}.get(name)
        is_transposed = isinstance(convolution_of(self.network, name), TRANSPOSED)
        if layer not in self.layers.image or axis is None or is_transposed or value.shape[axis] != len(order):
            raise configs.ConfigError(
                f"init.pretrained: its channels are in another order, which {name} cannot follow; list the "
                "channels in its order"
            )
        return value.index_select(axis, torch.tensor(order))

    def _inflated(self, name: str, pair: Pair) -> Tensor | None:
        """A 2D kernel for a 3D layer; None: it is no such kernel, or is not wanted."""
        if self.inflate_2d is None or not pair.is_2d_to_3d:
            return None
        layer = convolution_of(self.network, name)
        if layer is None:
            return None
        return inflate_2d(pair.file, layer, self.inflate_2d, self.axis)


def convolution_of(network: nn.Module, name: str) -> nn.Module | None:
    """The plain convolution that a tensor of the state dict belongs to; None: another layer."""
    try:
        layer = network.get_submodule(name.rpartition(".")[0])
    except AttributeError:  # a network may name what it saves as it likes
        return None
    return layer if isinstance(layer, CONVS + TRANSPOSED) else None
