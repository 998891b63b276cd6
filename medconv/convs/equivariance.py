"""For `conv=mirror`: runs a network to see which layers work on fields, and whether flips commute with it."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_leaves

from medconv.convs.parametrization import CONVS, TRANSPOSED

_TOLERANCE = 1e-3  # of the flip error over the output's standard deviation, fp32
_CARRIES_CHANNELS = (*CONVS, *TRANSPOSED, _BatchNorm, _InstanceNorm, nn.GroupNorm, nn.PReLU)


class NotEquivariantError(ValueError):
    """A network whose layers `Mirror` can replace, but that does not commute with flips then."""


def check_equivariance(network: nn.Module, example: Tensor, axes: Sequence[int]) -> None:
    """Compare f(flip x) with flip f(x), in both modes but without dropout, on perturbed parameters.

    Raises: NotEquivariantError: they differ; names the first layer whose output does.
    """
    copy = deepcopy(network)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in copy.parameters():  # initial biases (0) and norms (1) would hide untied copies
            p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p))
    image = torch.randn(example.shape, generator=generator).to(example)
    for mode in (False, True):
        copy.train(mode)
        for layer in copy.modules():
            if isinstance(layer, _DropoutNd):  # its mask does not turn with the image
                layer.eval()
        for axis in axes:
            error = _flip_error(copy, image, axis)
            if not error <= _TOLERANCE:  # also where it is NaN
                culprit = _first_break(copy, image, axis, 2 ** len(axes))
                raise NotEquivariantError(
                    f"Mirror cannot make this network equivariant to flips of axis {axis}: {culprit} breaks "
                    f"it (flip error {error:.2g} of the output's standard deviation)"
                )


def layers_with_channels(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers with parameters per channel: convolutions, norms, and activations such as PReLU."""
    for name, layer in list(network.named_modules()):
        if isinstance(layer, _CARRIES_CHANNELS):
            yield name, layer


@torch.enable_grad()
def fields(network: nn.Module, example: Tensor) -> dict[str, tuple[bool, bool]]:
    """Which layers read and write regular fields: all but those at the image and at the output.

    Runs one forward pass in which every convolution's output is a new leaf. Gradients then show which outputs
    reach which inputs without a convolution between. Tensors added or concatenated are of the same kind.
    """
    copy = deepcopy(network).train()
    leaves: list[tuple[str, Tensor]] = []
    reads: list[tuple[str, Tensor]] = []

    def before(name: str) -> Callable[..., None]:
        return lambda layer, args: reads.append((f"in {name}", args[0]))

    def after(name: str) -> Callable[..., Tensor]:
        def hook(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
            leaf = output.detach().requires_grad_()
            leaves.append((f"out {name}", leaf))
            return leaf.clone()  # activations may work in place

        return hook

    for name, layer in layers_with_channels(copy):
        layer.register_forward_pre_hook(before(name))
        if isinstance(layer, CONVS + TRANSPOSED):
            layer.register_forward_hook(after(name))
    image = example.detach().clone().requires_grad_()
    leaves.append(("image", image))
    reads += [("result", tensor) for tensor in _tensors(copy(image.clone()))]
    kinds = _Kinds()
    for reader, tensor in reads:
        if tensor.requires_grad:
            tensors = [leaf for _, leaf in leaves]
            slopes = torch.autograd.grad(tensor.sum(), tensors, retain_graph=True, allow_unused=True)
            for (leaf, _), slope in zip(leaves, slopes, strict=True):
                if slope is not None:
                    kinds.join(reader, leaf)
    kinds.join("image", "result")  # both are plain images, and so is whatever is added to them
    plain = kinds.of("image")
    names = {reader.removeprefix("in ") for reader, _ in reads if reader != "result"}
    return {n: (kinds.of(f"in {n}") != plain, kinds.of(f"out {n}") != plain) for n in sorted(names)}


class _Kinds:
    """Disjoint sets."""

    def __init__(self) -> None:
        self.parent: dict[str, str] = {}

    def of(self, item: str) -> str:
        while self.parent.setdefault(item, item) != item:
            item = self.parent[item]
        return item

    def join(self, a: str, b: str) -> None:
        self.parent[self.of(a)] = self.of(b)


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


@torch.no_grad()
def _run(network: nn.Module, image: Tensor) -> list[Tensor]:
    """With the same random numbers each time, so that stochastic depth leaves out the same samples."""
    with torch.random.fork_rng([image.device] if image.is_cuda else []):
        return _tensors(network(image))


@torch.no_grad()
def _flip_error(network: nn.Module, image: Tensor, axis: int) -> float:
    """Largest |f(flip x) - flip f(x)| over the standard deviation of f(x)."""
    errors = []
    for plain, flipped in zip(_run(network, image), _run(network, image.flip(2 + axis)), strict=True):
        where = axis + plain.ndim - image.ndim + 2  # heads may be stacked before the channels
        # class scores do not turn with the image
        expected = plain.flip(where) if plain.ndim >= image.ndim else plain
        errors.append(float((flipped - expected).abs().max() / plain.std().clamp(min=1e-12)))
    return max(errors)


@torch.no_grad()
def _first_break(network: nn.Module, image: Tensor, axis: int, copies: int) -> str:
    """The first layer to run whose outputs for an image and its flip are not flips of each other."""
    runs: list[list[tuple[str, Tensor]]] = []
    handles = []
    for name, layer in network.named_modules():
        undivided = not any(layer.children()) or isinstance(layer, _CARRIES_CHANNELS)
        if undivided and "parametrizations" not in name.split("."):
            handles.append(layer.register_forward_hook(lambda m, a, out, n=name: runs[-1].append((n, out))))
    for view in (image, image.flip(2 + axis)):
        runs.append([])
        _run(network, view)
    for handle in handles:
        handle.remove()
    for (name, plain), (_, flipped) in zip(*runs, strict=True):
        if not isinstance(plain, Tensor):
            continue
        if not _is_flip(plain, flipped, axis if plain.ndim == image.ndim else None, copies):
            kinds = [cls.__name__ for cls in type(network.get_submodule(name)).__mro__]
            return f"layer {name} ({next(kind for kind in kinds if not kind.startswith('Parametrized'))})"
    return "an operation outside of its layers"


def _is_flip(plain: Tensor, flipped: Tensor, axis: int | None, copies: int) -> bool:
    """Equal after the flip, as plain channels or with the copies of each field swapped one way or another.

    Args: axis: None for what has no spatial axes left.
    """
    mirrored = plain if axis is None else plain.flip(2 + axis)
    options = [mirrored]
    if plain.shape[1] % copies == 0:
        fields = mirrored.unflatten(1, (-1, copies))
        options += [fields[:, :, [h ^ g for h in range(copies)]].flatten(1, 2) for g in range(1, copies)]
    scale = float(plain.std()) or 1.0
    return any(float((flipped - option).abs().max()) <= _TOLERANCE * max(scale, 1e-12) for option in options)
