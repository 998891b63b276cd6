"""Make a tensor of a file fit the one of the network whose place it may take, or say why it does not."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from medconv.convs.parametrization import CONVS, TRANSPOSED
from medconv.models.pretrained import adapt
from medconv.models.pretrained.adapt import Layers


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
    """

    network: nn.Module
    num_channels: int
    layers: Layers
    inflate_2d: str | None
    axis: int
    has_other_classes: bool

    def __call__(self, name: str, pair: Pair) -> tuple[Tensor | None, str]:
        """What to load and how it was changed, or None and the reason."""
        if self.has_other_classes and adapt.within(name, self.layers.head):
            return None, "head of other classes"
        # first to 3D, since a file of 2D images may have other channels, too
        value = pair.file
        shape = tuple(pair.network.shape)
        changes: list[str] = []
        inflated = self._inflated(name, pair)
        if inflated is not None:
            value = inflated
            changes.append(f"2D to 3D by {self.inflate_2d}, axis {self.axis}")
        if value.shape != shape and adapt.within(name, self.layers.image):
            adapted = adapt.to_channels(value, shape, self.num_channels)
            if adapted is not None:
                value = adapted
                changes.append("other input channels")
        file_shape = tuple(pair.file.shape)
        if value.shape != shape:
            return None, f"{file_shape} in the file, here {shape}"
        if value.is_floating_point() != pair.network.is_floating_point() or value.is_complex():
            return None, f"{value.dtype} in the file, here {pair.network.dtype}"
        return value, f"{file_shape} to {shape}: {', '.join(changes)}" if changes else ""

    def _inflated(self, name: str, pair: Pair) -> Tensor | None:
        """A 2D kernel for a 3D layer; None: it is no such kernel, or is not wanted."""
        if self.inflate_2d is None or not pair.is_2d_to_3d:
            return None
        layer = convolution_of(self.network, name)
        if layer is None:
            return None
        return adapt.inflate_2d(pair.file, layer, self.inflate_2d, self.axis)


def convolution_of(network: nn.Module, name: str) -> nn.Module | None:
    """The plain convolution that a tensor of the state dict belongs to; None: another layer."""
    try:
        layer = network.get_submodule(name.rpartition(".")[0])
    except AttributeError:  # a network may name what it saves as it likes
        return None
    return layer if isinstance(layer, CONVS + TRANSPOSED) else None
