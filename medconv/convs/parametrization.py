"""What all weight-space priors share: parameters in, the dense kernel of a plain `nn.ConvNd` out.

A prior is a parametrization (`torch.nn.utils.parametrize`) of a convolution's weight. Autograd, DDP,
`torch.compile` and cuDNN then see one library convolution. All priors are linear, so the kernel nearest to a
given dense one is a projection. `fold_convs` leaves plain torch modules, for prediction and export.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from medconv.utils.errors import explained

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# by the number of axes of an image batch, channels included
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_FOLD_TOLERANCE = 1e-3  # largest difference between a layer and its fold, over the layer's largest output
Option = TypeVar("Option", bound=Callable[..., nn.Module])


class UnsuitableLayerError(ValueError):
    """The convolution cannot replace this layer; `swap_convs` keeps the layer and reports `reason`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def for_volumes(option: Option) -> Option:
    """Mark a convolution that is for 3D images alone, so that a plan does not take their slices."""
    option.spatial_dims = 3  # type: ignore[attr-defined]
    return option


def draws_only(unless: str) -> Callable[[Option], Option]:
    """Mark a convolution that gives layers new weights and leaves them as they are, unless this argument is
    true. Where weights are loaded afterwards, it has nothing to do.
    """

    def mark(option: Option) -> Option:
        option.draws_only_unless = unless  # type: ignore[attr-defined]
        return option

    return mark


def only_draws(conv: Callable[..., Any]) -> bool:
    """Whether a convolution, with its arguments, leaves layers as they are but for new weights."""
    function, arguments = (conv.func, conv.keywords) if isinstance(conv, partial) else (conv, {})
    unless = getattr(function, "draws_only_unless", None)
    return unless is not None and not arguments.get(unless)


class Prior(nn.Module):
    """Any parametrization of this package; `fold_convs` removes these and no others."""


class WeightPrior(Prior):
    """A dense kernel computed from a three-axis parameter.

    `Module.to(memory_format=...)` would raise for an original of four axes in 3D and of five in 2D.

    Shape:
        original (rows, coefficients, columns), as each subclass defines -> weight (out, in, *kernel_size).
    """

    layout: Tensor

    def __init__(self, kernel_size: Sequence[int]) -> None:
        super().__init__()
        self.kernel_size = tuple(kernel_size)
        # `.to(memory_format=...)` changes the strides of this buffer as it would change a plain weight's.
        layout = torch.zeros(1, 2, *[2] * len(self.kernel_size))
        self.register_buffer("layout", layout, persistent=False)

    def taps(self, original: Tensor) -> Tensor:
        """The kernel as (out, taps, in)."""
        raise NotImplementedError

    def nearest(self, taps: Tensor) -> Tensor:
        """The original whose kernel is nearest, in the least-squares sense, to these taps (out, taps, in)."""
        raise NotImplementedError

    def forward(self, original: Tensor) -> Tensor:
        """The dense kernel, in fp32 or better even inside autocast: a bf16 one would differ from the folded.

        With taps before input channels the kernel is channels-last already; other layers need one copy.
        """
        with torch.autocast(original.device.type, enabled=False):
            precise = original.to(torch.promote_types(original.dtype, torch.float32))
            taps = self.taps(precise)
            # (out, taps, in) -> (out, *kernel_size, in) -> (out, in, *kernel_size), a view
            weight: Tensor = taps.unflatten(1, self.kernel_size).movedim(-1, 1)
            weight = weight.to(original.dtype)
        return weight.contiguous(memory_format=self.memory_format)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Project a dense (pretrained) weight into the prior."""
        taps = weight.detach().double().flatten(2).transpose(1, 2)
        return self.nearest(taps).to(weight.dtype).contiguous()

    @property
    def memory_format(self) -> torch.memory_format:
        """The memory format that `.to(memory_format=...)` set for this layer."""
        channels_last = CHANNELS_LAST.get(self.layout.ndim, torch.contiguous_format)
        if self.layout.is_contiguous(memory_format=channels_last):
            return channels_last
        return torch.contiguous_format


class EquivariantPrior(WeightPrior):
    """A prior of a network that commutes with flips: f(flip x) = flip f(x).

    Inside, its channels need not be plain ones; there may be a copy of each for each flip.

    Args:
        axes: spatial axes along which the image may be flipped, counted from 0.
    """

    axes: tuple[int, ...]

    def make_head(self, layer: nn.Module) -> None:
        """Make a convolution map the network's channels to plain ones, which a flip only flips; in place.

        Raises:
            ValueError: its input channels are none of this network.
        """
        raise NotImplementedError


def mirror_axes(network: nn.Module) -> tuple[int, ...]:
    """The axes along which flips of the image only flip a network's output, as with `conv=mirror`."""
    priors = (module for module in network.modules() if isinstance(module, EquivariantPrior))
    return next((prior.axes for prior in priors), ())


class ForwardMixin(nn.Module):
    """Overrides `forward` of the layer that `install` mixes it into.

    The layer's class is exchanged, not the layer: names, parameters, hooks and `isinstance` stay valid.
    """

    plain_class: ClassVar[type[nn.Module]]  # the layer's class without the mixin; `fold_convs` restores it


class Foldable(nn.Module):
    """A module that `fold_convs` replaces by plain torch modules, the result of `folded`.

    `check_folds` compares the two in a run of the network, unless the class is declared with
    `fold_is_tested=True`: a test of its package does that already. Subclasses do not inherit this, since they
    may compute something else.
    """

    fold_is_tested: ClassVar[bool] = False

    def __init_subclass__(cls, *, fold_is_tested: bool = False) -> None:
        super().__init_subclass__()
        cls.fold_is_tested = fold_is_tested

    def folded(self) -> nn.Module:
        """Plain torch modules that compute the same in evaluation mode."""
        raise NotImplementedError


def install(
    layer: Conv, prior: nn.Module, init_from_weights: bool, mixin: type[ForwardMixin] | None = None
) -> nn.Module:
    """Put a prior on a layer's weight, in place.

    The new weight is either random with the variance of the old one, or a projection of it. A projection
    stores its relative error (Frobenius norm) in `layer.approximation_error`.

    Args:
        layer: the convolution.
        prior: the parametrization of its weight.
        init_from_weights: project the present weight instead of drawing a new one.
        mixin: overrides `forward` of the layer.
    Raises:
        ValueError: the layer cannot have this prior; it is unchanged.
    """
    check_free(layer)
    dense = layer.weight.detach().clone()
    prior.to(dense).train(layer.training)
    # drawn before anything changes: it raises if the prior can only be zero
    new_original = None if init_from_weights else drawn(prior, dense)
    if mixin is not None:
        _mix_in(layer, mixin)
    # This projects the present weight through right_inverse.
    parametrize.register_parametrization(layer, "weight", prior, unsafe=True)
    layer.train(layer.training)
    if new_original is None:
        note_error(layer, layer.weight, dense)
    else:
        with torch.no_grad():
            layer.get_parameter("parametrizations.weight.original").copy_(new_original)
    return layer


def _mix_in(layer: nn.Module, mixin: type[ForwardMixin]) -> None:
    plain_class = type(layer)
    name = f"{mixin.__name__}{plain_class.__name__}"
    layer.__class__ = type(name, (mixin, plain_class), {"plain_class": plain_class})


def check_free(layer: nn.Module) -> None:
    """Check that a layer has a weight of its own, with values.

    Raises:
        UnsuitableLayerError: no values in the weight, or something computes them.
    """
    layer_class = type(layer).__name__
    if parametrize.is_parametrized(layer, "weight"):
        raise UnsuitableLayerError(f"{layer_class} has a parametrized weight already", "parametrized already")
    if "weight" not in layer._parameters:
        raise UnsuitableLayerError(
            f"{layer_class} has no weight parameter of its own", "weight computed already"
        )
    weight = layer.get_parameter("weight")
    if nn.parameter.is_lazy(weight) or weight.is_meta:
        raise UnsuitableLayerError(
            f"{layer_class} has no values in its weight yet (lazy, or on the meta device)", "empty"
        )


def has_own_forward(conv: nn.Module) -> bool:
    """Whether a subclass changed what torch's convolution does with its weight."""
    return type(conv).forward not in {torch_class.forward for torch_class in CONVS}


def check_replaceable(conv: Any, name: str) -> None:
    """Check that plain layers in its place would lose nothing of the convolution.

    Raises:
        UnsuitableLayerError: grouped, a forward of its own, or a computed weight.
    """
    check_plain_groups(conv, name)
    if has_own_forward(conv):
        raise UnsuitableLayerError(
            f"conv={name} cannot replace {type(conv).__name__}, which has a forward of its own", "own forward"
        )
    check_free(conv)


def check_plain_groups(conv: Conv, name: str) -> None:
    """Check that every output reads every input.

    Raises:
        UnsuitableLayerError: a grouped convolution.
    """
    if conv.groups != 1:
        raise UnsuitableLayerError(f"conv={name} needs groups=1, got {conv.groups}", "grouped")


def rms(weight: Tensor) -> float:
    """Root mean square, computed in float64."""
    return float(weight.detach().double().square().mean().sqrt())


@torch.no_grad()
def drawn(prior: Any, dense: Tensor) -> Tensor:
    """Random parameters of a prior, whose kernel has the rms of `dense`.

    Raises:
        ValueError: every kernel is zero.
    """
    original = torch.randn_like(prior.right_inverse(dense))
    kernel_rms = rms(prior(original))
    if kernel_rms == 0:
        raise ValueError("the bank or mask makes every weight zero, nothing could be learned")
    return original * (rms(dense) / kernel_rms)


def note_error(module: Any, approximation: Tensor, target: Tensor) -> None:
    """Store the relative error (Frobenius norm) of a weight in `module.approximation_error`.

    Nothing is stored where the shapes differ: `spacing` changes the number of taps.
    """
    if approximation.shape != target.shape:
        return
    scale = max(float(target.double().norm()), 1e-30)  # a weight of zeros has an error, too
    difference = approximation.detach().double() - target.double()
    module.approximation_error = float(difference.norm()) / scale


def replace(network: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module in the place of another, under all its names: DynUNet registers its layers twice.

    Raises:
        ValueError: the module to replace is the network itself.
    """
    old = network.get_submodule(name)
    if new is old:  # changed in place
        return
    if not name:
        raise ValueError(
            f"a bare {type(network).__name__} cannot be replaced inside itself: call the conv on it"
        )
    for dotted_name, module in list(network.named_modules(remove_duplicate=False)):
        if module is old:
            parent_name, _, child_name = dotted_name.rpartition(".")
            setattr(network.get_submodule(parent_name), child_name, new)


def fold_convs(network: nn.Module) -> nn.Module:
    """A copy of the network in plain torch modules: each weight-space prior is folded into an `nn.ConvNd`."""
    folded = deepcopy(network)
    layers: list[tuple[str, Any]] = list(folded.named_modules())
    # All kernels first: several may be computed from one parameter.
    # Not those that another package's parametrizations compute.
    computed = [
        (layer, key)
        for _, layer in layers
        if parametrize.is_parametrized(layer)
        for key, parametrizations in layer.parametrizations.items()
        if any(isinstance(each, Prior) for each in parametrizations)
    ]
    kernels = [getattr(layer, key).detach().clone() for layer, key in computed]
    for (layer, key), kernel in zip(computed, kernels, strict=True):
        _fold(layer, key, kernel)
    for name, layer in reversed(layers):  # inner ones first, which an outer one may move
        if isinstance(layer, Foldable):
            if not name:
                return layer.folded()
            replace(folded, name, layer.folded())
    return folded


def classes_that_stay(network: nn.Module, names: Iterable[str]) -> set[type[nn.Module]]:
    """Classes in these layers that are not torch's own even after folding: they are no `Foldable`."""
    layers = dict(fold_convs(network).named_modules())
    # a Foldable around one may have replaced it
    classes = {type(module) for name in names if name in layers for module in layers[name].modules()}
    return {kind for kind in classes if not kind.__module__.startswith("torch.")}


@torch.no_grad()
def check_folds(network: nn.Module, example: Tensor) -> None:
    """Run the network and compare each layer that folds with what it folds to.

    Layers of a class declared with `fold_is_tested` are left out, and a network without others is not run.

    Args:
        network: in evaluation mode.
        example: an input of it.
    Raises:
        ValueError: `folded()` of a layer, which is named, computes something else.
    """
    hooks: list[Any] = []
    for name, layer in network.named_modules():
        if isinstance(layer, Foldable) and not layer.fold_is_tested:
            check = _FoldCheck(name, folded=deepcopy(layer).folded().eval())
            hooks.append(layer.register_forward_pre_hook(check.keep_input, with_kwargs=True))
            hooks.append(layer.register_forward_hook(check.compare, with_kwargs=True))
    try:
        if hooks:
            network(example)
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class _FoldCheck:
    """Compares what a layer and its fold return for the same input, by hooks on the layer."""

    name: str
    folded: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def keep_input(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = deepcopy((args, kwargs))  # the layer may change them

    def compare(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        subject = f"layer {self.name}: what folded() of {type(layer).__name__} returns"
        with explained(f"{subject} cannot take the layer's input"):
            folded_output = self.folded(*self.args, **self.kwargs)
        difference = math.inf
        if folded_output.shape == output.shape:
            largest_output = output.abs().max().clamp_min(1e-6)
            difference = float((folded_output - output).abs().max() / largest_output)
        if not difference < _FOLD_TOLERANCE:  # also where it is NaN
            raise ValueError(
                f"{subject} differs from the layer by {difference:.2g} of the layer's largest output, "
                "and predictions and exports use it"
            )


def _fold(layer: Any, key: str, kernel: Tensor) -> None:
    """Remove a parametrization and leave what it computed."""
    parametrizations = layer.parametrizations[key]
    learns = any(parameter.requires_grad for parameter in parametrizations.parameters())
    _give_plain_class(layer)
    # With several originals torch can only leave the kernel.
    has_one_original = hasattr(parametrizations, "original")
    parametrize.remove_parametrizations(layer, key, leave_parametrized=not has_one_original)
    setattr(layer, key, nn.Parameter(kernel, requires_grad=learns))


def _give_plain_class(layer: nn.Module) -> None:
    """Give a parametrized layer a class that no other layer has, without our mixin.

    torch's `parametrize` makes a subclass for each layer, which holds the computed weight as a property, and
    removal deletes the property from it. `deepcopy` lets the copy share the class, so the original would lose
    its property. After the removal torch sets the layer's class to the base, which must be the plain one.
    """
    parametrized_class = type(layer)
    bases = tuple(
        base.plain_class if issubclass(base, ForwardMixin) else base for base in parametrized_class.__bases__
    )
    layer.__class__ = type(parametrized_class.__name__, bases, dict(vars(parametrized_class)))
