"""Capture a network as one graph of operations, for any batch size and, where possible, any size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from medconv.inference.exported.load import quiet
from medconv.inference.load import LoadedModel
from medconv.models.outputs import full_resolution
from medconv.utils.errors import with_class


class Logits(nn.Module):
    """The exported part of a network: (batch, channels, *spatial) -> logits (batch, outputs, *spatial),
    without deep supervision heads; for an image-level network (batch, outputs)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        return full_resolution(self.network(image))


@dataclass(frozen=True)
class Captured:
    """A network and its graph.

    Args:
        example: the input that it was captured with.
        divisor: each spatial size must be a multiple of it.
        dynamic: per spatial axis, whether it takes other sizes than the patch's, from `2 * divisor` upwards.
    """

    module: Logits
    program: Any  # a torch.export.ExportedProgram
    example: Tensor
    divisor: tuple[int, ...]
    dynamic: tuple[bool, ...]

    @property
    def larger(self) -> tuple[int, ...]:
        """Another size than the example's, along dynamic axes."""
        sizes = zip(self.example.shape[2:], self.divisor, self.dynamic, strict=True)
        return tuple(n + d if dynamic else n for n, d, dynamic in sizes)


def capture(model: LoadedModel) -> Captured:
    """Args: model: loaded with `plain=True`.

    Raises: ValueError: it cannot be exported, for example since its code branches on an image's values.
    """
    assert not any(parametrize.is_parametrized(layer) for layer in model.network.modules()), "fold first"
    module, patch, channels = Logits(model.network).eval(), model.window.patch_size, len(model.modalities)
    example = torch.randn(2, channels, *patch, generator=torch.Generator().manual_seed(0))
    divisor, reason = divisor_of(model.network, example), ""
    open_axes = tuple(
        model.targets.per_voxel and n % d == 0 and n >= 2 * d for n, d in zip(patch, divisor, strict=True)
    )
    for dynamic in dict.fromkeys([open_axes, (False,) * len(patch)]):
        try:
            with quiet(), torch.no_grad():
                program = torch.export.export(module, (example,), dynamic_shapes=(_open(divisor, dynamic),))
        except Exception as error:  # torch has many classes for code that it cannot capture
            reason = with_class(error)
            continue
        return Captured(module, program, example, divisor, dynamic)
    kind = type(model.network).__name__
    raise ValueError(f"{model.path}: its network, {kind}, cannot be exported ({reason})")


@torch.no_grad()
def divisor_of(network: nn.Module, example: Tensor) -> tuple[int, ...]:
    """The divisor of each spatial size: the image's over that of the smallest output of a convolution."""
    if isinstance(divisor := getattr(network, "divisor", None), tuple):
        return divisor
    size, coarsest = example.shape[2:], [1] * (example.ndim - 2)

    def measure(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.shape[2:].numel() > 1:  # else it is a mean over the image, as in squeeze-and-excitation
            steps = [max(1, round(n / m)) for n, m in zip(size, output.shape[2:], strict=True)]
            coarsest[:] = [max(a, b) for a, b in zip(coarsest, steps, strict=True)]

    kinds = (nn.Conv2d, nn.Conv3d)
    hooks = [layer.register_forward_hook(measure) for layer in network.modules() if isinstance(layer, kinds)]
    network(example)
    for hook in hooks:
        hook.remove()
    return tuple(coarsest)


def _open(divisor: Sequence[int], dynamic: Sequence[bool]) -> dict[int, Any]:
    """Dynamic shapes for torch.export: any batch size, and multiples of the divisor along dynamic axes."""
    dims: dict[int, Any] = {0: torch.export.Dim("batch")}
    for axis, step in enumerate(divisor):
        if dynamic[axis]:
            # At least 2: with 1, a norm at the lowest resolution may have a single voxel.
            blocks = torch.export.Dim(f"blocks{axis}", min=2)
            dims[2 + axis] = step * blocks if step > 1 else blocks
    return dims
