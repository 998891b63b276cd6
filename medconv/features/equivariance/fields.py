"""Runs a network to see which layers work on fields, and whether it commutes with motions of the image."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from medconv.convs.parametrization import CONVS, TRANSPOSED
from medconv.features.equivariance.group import Group, Motion

_TOLERANCE = 1e-3  # of the error over the output's standard deviation, fp32
_CARRIES_CHANNELS = (*CONVS, *TRANSPOSED, _BatchNorm, _InstanceNorm, nn.GroupNorm, nn.PReLU)


def check_equivariance(network: nn.Module, example: Tensor, group: Group) -> None:
    """Compare f(g x) with g f(x), in both modes but without dropout, on perturbed parameters, in fp32.

    Args:
        example: an input (batch, channels, *spatial); only its shape and type matter.
        group: each of its generators is tried.
    Raises:
        ValueError: they differ; names the first layer whose output does.
    """
    copy = deepcopy(network)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in copy.parameters():  # initial biases (0) and norms (1) would hide untied copies
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * noise.to(parameter))
    shape = list(example.shape)
    for plane in group.planes:  # a turn must leave the shape as it is
        longest = max(shape[2 + axis] for axis in plane)
        shape = [longest if axis - 2 in plane else size for axis, size in enumerate(shape)]
    image = torch.randn(shape, generator=generator).to(example)
    # in training, batch norms use the statistics of the batch, which must not depend on the copy
    for mode in (False, True):
        copy.train(mode)
        for layer in copy.modules():
            if isinstance(layer, _DropoutNd):  # its mask does not turn with the image
                layer.eval()
        with torch.autocast(image.device.type, enabled=False):  # a caller's bf16 is no broken symmetry
            for motion in group.generators:
                _check_motion(copy, image, motion, group)


def _check_motion(network: nn.Module, image: Tensor, motion: Motion, group: Group) -> None:
    error = _error(network, image, motion)
    if error <= _TOLERANCE:  # not so where it is NaN
        return
    culprit = _first_break(network, image, motion, group)
    has_image = any(output.ndim >= image.ndim for output in _run(network, image))
    hint = "" if has_image else "; model=encoder keeps the symmetry"
    raise ValueError(
        f"cannot make this network equivariant to {motion}: {culprit} breaks it (error {error:.2g} of "
        f"the output's standard deviation){hint}"
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

    Returns:
        Name of a layer with channels that has run, to whether its input and its output are regular fields.
    """
    trace = _trace(network, example)
    kinds = _Kinds()
    leaves = [leaf for _, leaf in trace.leaves]
    # What a tensor depends on without a convolution between is of its kind.
    for reader, tensor in trace.reads:
        if not tensor.requires_grad:
            continue
        slopes = torch.autograd.grad(
            tensor.sum(),
            leaves,
            retain_graph=True,  # the same graph for each reader
            allow_unused=True,
        )
        for (writer, _), slope in zip(trace.leaves, slopes, strict=True):
            if slope is not None:
                kinds.join(reader, writer)
    kinds.join("image", "result")  # both are plain images, and so is whatever is added to them
    plain = kinds.of("image")
    names = {reader.removeprefix("in ") for reader, _ in trace.reads if reader != "result"}
    regular = {}
    for name in sorted(names):
        reads_fields = kinds.of(f"in {name}") != plain
        writes_fields = kinds.of(f"out {name}") != plain
        regular[name] = (reads_fields, writes_fields)
    return regular


@dataclass
class _Trace:
    """One forward pass, cut after every convolution.

    Args:
        leaves: `image` or `out NAME`, and the tensor there, from which a new graph begins.
        reads: `in NAME` or `result`, and the tensor that a layer or the caller got.
    """

    leaves: list[tuple[str, Tensor]] = field(default_factory=list)
    reads: list[tuple[str, Tensor]] = field(default_factory=list)

    def hook_input(self, name: str) -> Callable[..., None]:
        def note(layer: nn.Module, args: Any, named: Any) -> None:
            self.reads.append((f"in {name}", args[0] if args else named["input"]))

        return note

    def hook_output(self, name: str) -> Callable[..., Tensor]:
        def hook(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
            leaf = output.detach().requires_grad_()
            self.leaves.append((f"out {name}", leaf))
            return leaf.clone()  # activations may work in place

        return hook


def _trace(network: nn.Module, example: Tensor) -> _Trace:
    copy = deepcopy(network).train()
    trace = _Trace()
    for name, layer in layers_with_channels(copy):
        layer.register_forward_pre_hook(trace.hook_input(name), with_kwargs=True)
        if isinstance(layer, CONVS + TRANSPOSED):
            layer.register_forward_hook(trace.hook_output(name))
    image = example.detach().clone().requires_grad_()
    trace.leaves.append(("image", image))
    outputs = _tensors(copy(image.clone()))
    trace.reads += [("result", tensor) for tensor in outputs]
    return trace


class _Kinds:
    """Disjoint sets (union-find): what is connected without a convolution between is of one kind."""

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
def _error(network: nn.Module, image: Tensor, motion: Motion) -> float:
    """Largest |f(g x) - g f(x)| over the standard deviation of f(x)."""
    errors = []
    outputs = _run(network, image)
    outputs_of_moved = _run(network, motion(image, 2))
    for output, output_of_moved in zip(outputs, outputs_of_moved, strict=True):
        heads = output.ndim - image.ndim  # axes of stacked heads before the channels
        expected = motion(output, 2 + heads) if heads >= 0 else output  # class scores do not move
        difference = (output_of_moved - expected).abs().max()
        scale = output.std().clamp(min=1e-12)
        errors.append(float(difference / scale))
    return max(errors)


@torch.no_grad()
def _first_break(network: nn.Module, image: Tensor, motion: Motion, group: Group) -> str:
    """The first layer to run whose output for the moved image is not its output for the image, moved."""
    outputs = _outputs_by_layer(network, image)
    outputs_of_moved = _outputs_by_layer(network, motion(image, 2))
    for (name, output), (_, output_of_moved) in zip(outputs, outputs_of_moved, strict=True):
        if not isinstance(output, Tensor):
            continue
        moved = motion(output, 2) if output.ndim == image.ndim else output
        if not _is_moved(moved, output_of_moved, group):
            layer_class = parametrize.type_before_parametrizations(network.get_submodule(name))
            return f"layer {name} ({layer_class.__name__})"
    return "an operation outside of its layers"


def _outputs_by_layer(network: nn.Module, image: Tensor) -> list[tuple[str, Any]]:
    """What each layer without children returns, in the order in which they run."""
    outputs: list[tuple[str, Any]] = []

    def recorder(name: str) -> Callable[..., None]:
        return lambda layer, args, output: outputs.append((name, output))

    handles = []
    for name, layer in network.named_modules():
        # A parametrized convolution has children, its priors, and counts as one layer.
        is_single = not any(layer.children()) or isinstance(layer, _CARRIES_CHANNELS)
        if is_single and "parametrizations" not in name.split("."):
            handles.append(layer.register_forward_hook(recorder(name)))
    _run(network, image)
    for handle in handles:
        handle.remove()
    return outputs


def _is_moved(moved: Tensor, output: Tensor, group: Group) -> bool:
    """Equal, as plain channels or with the copies of each field permuted by one element of the group."""
    candidates = [moved]
    if moved.shape[1] % len(group) == 0:
        by_copy = moved.unflatten(1, (-1, len(group)))
        candidates += [by_copy[:, :, order].flatten(1, 2) for order in group.products]
    tolerance = _TOLERANCE * max(float(moved.std()) or 1.0, 1e-12)
    return any(float((output - candidate).abs().max()) <= tolerance for candidate in candidates)
