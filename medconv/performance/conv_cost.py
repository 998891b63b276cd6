"""What a convolution costs beside `nn.Conv`: seconds, memory and operators, what limits it, what helps."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from medconv.convs.fold import fold_convs
from medconv.convs.parametrization import CHANNELS_LAST
from medconv.performance.alternating import alternate

LIBRARY = "nn.Conv"
CUSTOM = "as it is"
_SAME = 1.1  # times nn.Conv, below which nothing is to be gained
_SMALL_EDGE = 4  # voxels of an image so small that only fixed work is left
_FIXED = 0.5  # share of the time from which fixed work is called the limit
_ARITHMETIC = 0.8  # share of the ratio of seconds that more arithmetic must explain
Run = Callable[[], Any]


@dataclass(frozen=True)
class Layer:
    """A convolution of a network, the one in its place, and the input that both get.

    Args:
        name: of the layer.
        count: layers of the network with the same sizes.
        library: the `nn.ConvNd`.
        custom: the module in its place.
        image: (batch, channels, *spatial).
    """

    name: str
    count: int
    library: nn.Module
    custom: nn.Module
    image: Tensor

    @property
    def case(self) -> str:
        size = "x".join(map(str, self.image.shape[2:]))
        return f"{self.name}, {self.image.shape[1]} channels at {size}, batch {self.image.shape[0]}"


def cost(layer: Layer, pairs: int) -> dict[str, Any]:
    """Forward and backward of both, in turn. Args: pairs: rounds."""
    steps = {LIBRARY: _step(layer.library, layer.image), CUSTOM: _step(layer.custom, layer.image)}
    timed = alternate(steps, LIBRARY, pairs)
    return {
        "benchmark": "bench-conv",
        "case": layer.case,
        "count": layer.count,
        "library_seconds": timed[LIBRARY]["seconds"],
        **timed[CUSTOM],
        "kept_bytes": [kept_bytes(layer.library, layer.image), kept_bytes(layer.custom, layer.image)],
        "operators": [counted(steps[LIBRARY]).operators, counted(steps[CUSTOM]).operators],
    }


def limit(layer: Layer, ratio: float, pairs: int) -> str:
    """What makes the custom layer slower than `nn.Conv`, by measurement. Args: ratio: of their seconds."""
    if ratio < _SAME:
        return "nothing: it costs what nn.Conv costs"
    # work that does not depend on the image is what stays when the image is tiny
    small = layer.image
    for axis in range(2, small.ndim):
        small = small.narrow(axis, 0, min(_SMALL_EDGE, small.shape[axis]))
    steps = {"whole": _step(layer.custom, layer.image), "small": _step(layer.custom, small)}
    fixed = alternate(steps, "whole", pairs)["small"]["ratio"]
    if fixed > _FIXED:
        return (
            f"fixed work: {fixed:.0%} of the time is left on an image of {_SMALL_EDGE} voxels an axis, for "
            "launches and for computing the weight; larger patches and batches hide it"
        )
    more = counted(steps["whole"]).flops / max(1, counted(_step(layer.library, layer.image)).flops)
    if more >= _ARITHMETIC * ratio:
        return f"arithmetic: {more:.2f} times the operations of nn.Conv"
    return f"memory traffic: {more:.2f} times the operations of nn.Conv take {ratio:.2f} times as long"


def remedies(layer: Layer, pairs: int, compiles: bool) -> list[dict[str, Any]]:
    """Variants of the custom layer, each timed in turn with the layer as it is.

    Args:
        pairs: rounds.
        compiles: also `torch.compile`, which takes up to a minute and needs a C++ compiler on a CPU.
    """
    custom: Any = layer.custom
    contiguous = deepcopy(custom).to(memory_format=torch.contiguous_format)
    kept = kept_bytes(custom, layer.image)
    rows = [
        _remedy("folded, for prediction", fold_convs(custom), layer, pairs, forward=True),
        _remedy("contiguous, not channels-last", contiguous, layer, pairs, contiguous=True),
        _remedy("checkpointed", _Checkpointed(custom), layer, pairs),
    ]
    if compiles:
        compiled: Any = torch.compile(deepcopy(custom))
        rows.append(_remedy("compiled", compiled, layer, pairs))
    return [{**row, "reference_kept_bytes": kept} for row in rows]


def _remedy(
    name: str,
    variant: nn.Module,
    layer: Layer,
    pairs: int,
    forward: bool = False,
    contiguous: bool = False,
) -> dict[str, Any]:
    make = _forward if forward else _step
    image = layer.image.contiguous() if contiguous else layer.image
    steps = {CUSTOM: make(layer.custom, layer.image), name: make(variant, image)}
    timing = alternate(steps, CUSTOM, pairs)[name]
    kept = None if forward else kept_bytes(variant, image)
    return {"benchmark": "bench-conv", "case": layer.case, "variant": name, **timing, "kept_bytes": kept}


class _Checkpointed(nn.Module):
    """Computes a layer again in the backward pass instead of keeping what it needs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


def _forward(layer: nn.Module, image: Tensor) -> Run:
    return torch.no_grad()(partial(layer, image))


def _step(layer: nn.Module, image: Tensor) -> Run:
    """Forward and backward, to the image and all parameters that learn."""
    leaf = image.detach().requires_grad_()
    with torch.no_grad():
        # a fixed gradient, so that no loss is timed
        gradient = torch.randn_like(layer(leaf))
    leaves = [leaf, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    return lambda: torch.autograd.grad(layer(leaf), leaves, gradient, allow_unused=True)


def kept_bytes(layer: nn.Module, image: Tensor) -> int:
    """Bytes that the forward pass keeps for backward, without the image and the parameters themselves."""
    leaf = image.detach().requires_grad_()
    # storages, not tensors: a view keeps the memory of what it views
    known = {tensor.untyped_storage().data_ptr() for tensor in (leaf, *layer.parameters())}
    kept: dict[int, int] = {}
    tensors = []  # alive, so that no two have one address

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        tensors.append(tensor)
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(leaf)
    return sum(size for address, size in kept.items() if address not in known)


class Counter(TorchDispatchMode):
    """Inside, counts the operators that compute, without views, and their floating-point operations.

    On a GPU an operator is at least one launch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators += not func.is_view
        flops_of = flop_registry.get(func.overloadpacket)
        # operators that are not registered, such as additions, cost memory traffic, not arithmetic
        if flops_of is not None:
            self.flops += flops_of(*args, **(kwargs or {}), out_val=result)
        return result


def counted(run: Run) -> Counter:
    """The operators of one call."""
    counter = Counter()
    with counter:
        run()
    return counter


def in_channels_last(layer: Any, image: Tensor) -> tuple[nn.Module, Tensor]:
    """A copy of the layer and the image in the layout that networks of medconv train in."""
    layout = CHANNELS_LAST[image.ndim]
    return deepcopy(layer).to(memory_format=layout), image.contiguous(memory_format=layout)
