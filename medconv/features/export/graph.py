"""Capture a network as one graph of operations, for any batch size and, where possible, any size."""

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from medconv.inference.load import LoadedModel
from medconv.models.outputs import full_resolution
from medconv.utils.errors import with_class


class Logits(nn.Module):
    """The exported part of a network, without deep supervision heads.

    Shape: (batch, channels, *spatial) -> logits (batch, outputs, *spatial), or (batch, outputs) of an
    image-level network.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        return full_resolution(self.network(image))


class MeanNetwork(nn.Module):
    """The mean of the logits of several networks. Shape: as `Logits`."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        stated = getattr(members[0], "divisor", None)
        if stated is not None:  # of networks with the same patch
            self.divisor = stated

    def forward(self, image: Tensor) -> Tensor:
        logits = [full_resolution(member(image)) for member in self.members]
        return torch.stack(logits).mean(0)


@dataclass(frozen=True)
class Captured:
    """A network and its graph.

    Args:
        module: the network, without deep supervision heads.
        program: a torch.export.ExportedProgram.
        example: the input that it was captured with.
        divisor: each spatial size must be a multiple of it.
        dynamic: per spatial axis, whether it takes other sizes than the patch's, from `2 * divisor` upwards.
    """

    module: Logits
    program: Any
    example: Tensor
    divisor: tuple[int, ...]
    dynamic: tuple[bool, ...]

    @property
    def larger(self) -> tuple[int, ...]:
        """Another size than the example's, along dynamic axes."""
        size = list(self.example.shape[2:])
        for axis, is_dynamic in enumerate(self.dynamic):
            if is_dynamic:
                size[axis] += self.divisor[axis]
        return tuple(size)


def capture(model: LoadedModel) -> Captured:
    """The graph of a network, open to other sizes along as many axes as torch allows.

    Args:
        model: loaded with `plain=True`.
    Raises:
        ValueError: it cannot be exported, for example since its code branches on an image's values.
    """
    assert not any(parametrize.is_parametrized(layer) for layer in model.network.modules()), "fold first"
    module = Logits(model.network).eval()
    example = _example(model)
    divisor = divisor_of(model.network, example)
    reason = ""
    # Some networks hold numbers of the patch's size, such as that of attention windows.
    no_axes = (False,) * len(divisor)
    for dynamic in dict.fromkeys([_open_axes(model, divisor), no_axes]):
        shapes = (_dynamic_shapes(divisor, dynamic),)
        try:
            with quiet(), torch.no_grad():
                program = torch.export.export(module, (example,), dynamic_shapes=shapes)
        # torch has many classes for code that it cannot capture.
        except Exception as error:
            reason = with_class(error)
            continue
        return Captured(module=module, program=program, example=example, divisor=divisor, dynamic=dynamic)
    kind = type(model.network).__name__
    raise ValueError(f"{model.path}: its network, {kind}, cannot be exported ({reason})")


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's deprecation warnings and progress output."""
    before = logging.root.manager.disable
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.ERROR)
            # Some of it is printed, graphs too.
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                yield
    finally:
        logging.disable(before)


def _example(model: LoadedModel) -> Tensor:
    """A batch of 2: torch.export takes a size of 1 for a constant."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, len(model.modalities), *model.window.patch_size, generator=generator)


def _open_axes(model: LoadedModel, divisor: Sequence[int]) -> tuple[bool, ...]:
    """Per spatial axis, whether the network may take other sizes than the patch's."""
    return tuple(
        model.targets.per_voxel and size % step == 0 and size >= 2 * step
        for size, step in zip(model.window.patch_size, divisor, strict=True)
    )


@torch.no_grad()
def divisor_of(network: nn.Module, example: Tensor) -> tuple[int, ...]:
    """The divisor of each spatial size: the image's over that of the smallest output of a convolution.

    Args:
        example: an input, (batch, channels, *spatial).
    """
    stated = getattr(network, "divisor", None)
    if isinstance(stated, tuple):
        return stated
    size = example.shape[2:]
    divisor = [1] * len(size)

    def measure(_: nn.Module, __: Any, output: Tensor) -> None:
        output_size = output.shape[2:]
        # A mean over the image, as in squeeze-and-excitation.
        if output_size.numel() == 1:
            return
        for axis, length in enumerate(output_size):
            if 2 * length <= size[axis] + 1:  # less is no stride but a convolution without padding
                # A network that rounds takes another way at each size, so that it has this one alone.
                step = size[axis] // length if size[axis] % length == 0 else size[axis]
                divisor[axis] = lcm(divisor[axis], step)

    convolutions = [layer for layer in network.modules() if isinstance(layer, (nn.Conv2d, nn.Conv3d))]
    hooks = [layer.register_forward_hook(measure) for layer in convolutions]
    network(example)
    for hook in hooks:
        hook.remove()
    return tuple(divisor)


def _dynamic_shapes(divisor: Sequence[int], dynamic: Sequence[bool]) -> dict[int, Any]:
    """Dynamic shapes for torch.export: any batch size, and multiples of the divisor along dynamic axes."""
    dims: dict[int, Any] = {0: torch.export.Dim("batch")}
    for axis, step in enumerate(divisor):
        if dynamic[axis]:
            # At least 2: with 1, a norm at the lowest resolution may have a single voxel.
            blocks = torch.export.Dim(f"blocks{axis}", min=2)
            dims[2 + axis] = step * blocks if step > 1 else blocks
    return dims
