"""Fold convolutions back to plain torch modules, and compare layers with what they fold to."""

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from medconv.convs.parametrization import Foldable, ForwardMixin, Prior, replace
from medconv.utils.errors import explained

_FOLD_TOLERANCE = 1e-3  # largest difference between a layer and its fold, over the layer's largest output


def fold_convs(network: nn.Module) -> nn.Module:
    """A copy of the network in plain torch modules: each weight-space prior is folded into an `nn.ConvNd`."""
    folded = deepcopy(network)
    if isinstance(folded, Foldable):
        return folded.folded()
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
    for name, layer in layers:
        if isinstance(layer, Foldable):
            replace(folded, name, layer.folded())
    return folded


def classes_that_stay(network: nn.Module, names: Iterable[str]) -> set[type[nn.Module]]:
    """Classes in these layers that are not torch's own even after folding: they are no `Foldable`."""
    folded = fold_convs(network)
    classes = {type(module) for name in names for module in folded.get_submodule(name).modules()}
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
                f"{subject} computes something else than the layer, by {difference:.2g} of its largest "
                "output; predictions and exports use it"
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
