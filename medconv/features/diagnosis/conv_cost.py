"""What a convolution costs beside `nn.Conv`: seconds, memory and operators, what limits it, what helps."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from medconv import config as configs
from medconv.config import Derived, Node, PerfConfig
from medconv.convs.channel_transform import TwoLaunches, in_two_launches
from medconv.convs.parametrization import CONVS, fold_convs
from medconv.features.diagnosis.alternating import alternate, computing_clock
from medconv.models.build import PLAIN_CONV, Builder, build_network
from medconv.models.outputs import evaluating
from medconv.performance.switches import apply_switches, memory_format, to_memory_format

LIBRARY = "nn.Conv"
CUSTOM = "as it is"
_SAME = 1.1  # times nn.Conv, below which nothing is to be gained
_SMALL_EDGE = 4  # voxels of an image so small that only fixed work is left
_FIXED = 0.5  # share of the extra time from which fixed work is called the limit
_ARITHMETIC = 0.8  # share of the ratio of seconds that more arithmetic must explain
_MAX_ROUNDS = 9  # of `price`
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
        channels_last: the memory format of all three; else contiguous.
    """

    name: str
    count: int
    library: nn.Module
    custom: nn.Module
    image: Tensor
    channels_last: bool = False

    @property
    def case(self) -> str:
        size = "x".join(map(str, self.image.shape[2:]))
        return f"{self.name}, {self.image.shape[1]} channels at {size}, batch {self.image.shape[0]}"


@dataclass(frozen=True)
class NetworkSizes:
    """Where a convolution is timed: in a network, at the sizes of its layers.

    Args:
        model: resolved node of the config.
        derived: patch, channels and classes.
        batch: samples.
        device: to compute on.
        switches: arguments of `apply_switches`, with which the network trains.
    """

    model: Node
    derived: Derived
    batch: int
    device: torch.device
    switches: Mapping[str, Any]


def switches_of(perf: PerfConfig) -> dict[str, Any]:
    """Those that change how layers compute; what `perf=autotune` would choose is on."""
    keys = ("channels_last", "fast_norm", "fast_depthwise")
    return {key: getattr(perf, key) is not False for key in keys}


def replaced_layers(
    sizes: NetworkSizes, conv: Node, build: Builder = configs.build, is_checked: bool = True
) -> Iterator[Layer]:
    """One layer of each kind and size that a convolution replaces, and the input that it gets.

    Args:
        conv: resolved node of the config.
        build: builds the convolution from its node.
        is_checked: whether the network was run with it before, as a training does.
    Raises:
        ConfigError: it was not, and the network cannot run with this convolution.
    """
    plain = build_network(sizes.model, PLAIN_CONV, sizes.derived)
    network = build_network(sizes.model, conv, sizes.derived, build=build, weights_follow=is_checked)
    shapes = _input_shapes(plain, sizes.derived)
    library = dict(apply_switches(plain, **sizes.switches).named_modules())
    custom = dict(apply_switches(network, **sizes.switches).named_modules())
    channels_last = sizes.switches["channels_last"]
    alike: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        if type(custom.get(name)) not in (type(library[name]), type(None)):
            alike.setdefault(f"{library[name]} {shape}", []).append(name)
    for names in alike.values():
        name = names[0]
        image = torch.randn(sizes.batch, *shapes[name], device=sizes.device)
        yield Layer(
            name=name,
            count=len(names),
            library=library[name].to(sizes.device),
            custom=custom[name].to(sizes.device),
            image=image_in_layout(image, channels_last),
            channels_last=channels_last,
        )


def _input_shapes(network: nn.Module, derived: Derived) -> dict[str, tuple[int, ...]]:
    """Channels and voxels of the input of each convolution in its first call, in the order of the calls."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, layer: nn.Module, args: tuple[torch.Tensor]) -> None:
        shapes.setdefault(name, tuple(args[0].shape[1:]))

    for name, layer in network.named_modules():
        if isinstance(layer, CONVS):
            layer.register_forward_pre_hook(partial(note, name))
    with torch.no_grad(), evaluating(network):
        network(torch.zeros(1, derived.num_channels, *derived.patch_size))
    return shapes


def computing_in(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast as in training, but without its cache, which would cast a weight once for all rounds."""
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


def cost(layer: Layer, pairs: int) -> dict[str, Any]:
    """Forward and backward of both, in turn. Args: pairs: rounds."""
    steps = {LIBRARY: _step(layer.library, layer.image), CUSTOM: _step(layer.custom, layer.image)}
    timed = _timed(steps, LIBRARY, pairs)
    return {
        "benchmark": "bench-conv",
        "case": layer.case,
        "count": layer.count,
        "library_seconds": timed[LIBRARY]["seconds"],
        **timed[CUSTOM],
        "kept_bytes": [kept_bytes(layer.library, layer.image), kept_bytes(layer.custom, layer.image)],
        "operators": [counted(steps[LIBRARY]).operators, counted(steps[CUSTOM]).operators],
    }


def price(layers: Sequence[Layer], seconds: float) -> dict[str, Any]:
    """All layers of a network together beside `nn.Conv`, without spreads, for one line of a log.

    Args:
        layers: at least one.
        seconds: to measure for; one step of each layer is timed in any case.
    Returns:
        `ratio` of the times; `layer`, the name of that which adds most.
    """
    library = 0.0
    custom = 0.0
    most = -math.inf
    slowest = layers[0]
    for layer in layers:
        timed = _priced(layer, seconds / len(layers))
        library += layer.count * timed[LIBRARY]["seconds"]
        custom += layer.count * timed[CUSTOM]["seconds"]
        extra = layer.count * (timed[CUSTOM]["seconds"] - timed[LIBRARY]["seconds"])
        if extra > most:
            most = extra
            slowest = layer
    return {"ratio": custom / library, "layer": slowest.name}


def _priced(layer: Layer, seconds: float) -> dict[str, dict[str, float]]:
    """Times of both, from as many rounds as fit into some seconds."""
    steps = {LIBRARY: _step(layer.library, layer.image), CUSTOM: _step(layer.custom, layer.image)}
    first = alternate(steps, LIBRARY, pairs=1, warm_up=0, clock=computing_clock())
    # The first round warms up; it counts only where there is no time for another.
    rounds = int(seconds / sum(timing["seconds"] for timing in first.values())) - 1
    if rounds < 1:
        return first
    return alternate(steps, LIBRARY, pairs=min(rounds, _MAX_ROUNDS), warm_up=0, clock=computing_clock())


def limit(layer: Layer, ratio: float, pairs: int) -> str:
    """What makes the custom layer slower than `nn.Conv`, by measurement. Args: ratio: of their seconds."""
    if ratio < _SAME:
        return "nothing: it costs what nn.Conv costs"
    # work that does not depend on the image is what stays when the image is tiny
    small = _cropped(layer.image, layer.library)
    steps = {
        LIBRARY: _step(layer.library, layer.image),
        CUSTOM: _step(layer.custom, layer.image),
        f"{LIBRARY}, small": _step(layer.library, small),
        f"{CUSTOM}, small": _step(layer.custom, small),
    }
    timed = _timed(steps, LIBRARY, pairs)
    extra = timed[CUSTOM]["seconds"] - timed[LIBRARY]["seconds"]
    extra_small = timed[f"{CUSTOM}, small"]["seconds"] - timed[f"{LIBRARY}, small"]["seconds"]
    if extra > 0 and extra_small > _FIXED * extra:
        size = "x".join(map(str, small.shape[2:]))
        return (
            f"fixed work: of the {_milliseconds(extra)} more than nn.Conv, {_milliseconds(extra_small)} are "
            f"left on an image of {size}, for launches and for computing the weight; larger patches and "
            "batches hide it"
        )
    more = counted(steps[CUSTOM]).flops / max(1, counted(steps[LIBRARY]).flops)
    if more >= max(_SAME, _ARITHMETIC * ratio):
        return f"arithmetic: {more:.2f} times the operations of nn.Conv"
    return f"memory traffic: {more:.2f} times the operations of nn.Conv take {ratio:.2f} times as long"


def _timed(steps: Mapping[str, Run], reference: str, pairs: int) -> dict[str, dict[str, float]]:
    return alternate(steps, reference, pairs, clock=computing_clock())


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms"


def _cropped(image: Tensor, conv: Any) -> Tensor:
    """A corner so small that a convolution of it is fixed work, but not smaller than the kernel."""
    for axis, (size, dilation) in enumerate(zip(conv.kernel_size, conv.dilation, strict=True), start=2):
        extent = (size - 1) * dilation + 1
        edge = min(max(_SMALL_EDGE, extent), image.shape[axis])
        image = image.narrow(axis, 0, edge)
    return image


def remedies(layer: Layer, pairs: int, compiles: bool) -> list[dict[str, Any]]:
    """Variants of the custom layer, each timed in turn with the layer as it is.

    Args:
        pairs: rounds.
        compiles: also `torch.compile`, which takes up to a minute and needs a C++ compiler on a CPU.
    """
    custom: Any = layer.custom
    other = not layer.channels_last
    other_layout = in_layout(custom, other)
    layout_name = "channels-last" if other else "contiguous, not channels-last"
    kept = kept_bytes(custom, layer.image)
    rows = [
        _remedy("folded, for prediction", fold_convs(custom), layer, pairs, forward=True),
        _remedy(layout_name, other_layout, layer, pairs, channels_last=other),
        _remedy("checkpointed", _Checkpointed(custom), layer, pairs),
    ]
    if isinstance(custom, TwoLaunches):  # it takes one of these by the cost model
        rows.append(_remedy("in one launch", _OneLaunch(custom), layer, pairs))
        rows.append(_remedy("in two launches", _TwoLaunches(custom), layer, pairs))
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
    channels_last: bool | None = None,
) -> dict[str, Any]:
    make = _forward if forward else _step
    image = layer.image if channels_last is None else image_in_layout(layer.image, channels_last)
    steps = {CUSTOM: make(layer.custom, layer.image), name: make(variant, image)}
    timing = _timed(steps, CUSTOM, pairs)[name]
    kept = None if forward else kept_bytes(variant, image)
    return {"benchmark": "bench-conv", "case": layer.case, "variant": name, **timing, "kept_bytes": kept}


def in_layout(layer: nn.Module, channels_last: bool) -> nn.Module:
    """A copy of a layer in a memory format, as `apply_switches` would make it."""
    copy = deepcopy(layer)
    for module in copy.modules():
        if isinstance(module, CONVS):
            conv: Any = module
            conv.to(memory_format=torch.contiguous_format)
    return apply_switches(copy, channels_last=channels_last)


def image_in_layout(image: Tensor, channels_last: bool) -> Tensor:
    """The image in a memory format, also if it has one channel."""
    return to_memory_format(image, memory_format(channels_last, image.ndim - 2))


class _Checkpointed(nn.Module):
    """Computes a layer again in the backward pass instead of keeping what it needs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


class _OneLaunch(nn.Module):
    """A layer of `transform`, whose kernel is computed first."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer._conv_forward(x, self.layer.weight, self.layer.bias)


class _TwoLaunches(nn.Module):
    """A layer of `transform`, as a 1x1 convolution and its bank."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return in_two_launches(self.layer, x)


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
