"""Activation checkpointing: less memory, because the backward pass recomputes what the forward pass drops.

`blocks` keeps the input of each block and recomputes the whole block. `pointwise` keeps the outputs of
convolutions and recomputes only cheap operations: norms, activations, concatenations and sums
(`medconv.performance.checkpoint_pointwise`). Both give the gradients of the plain network, bit for bit where
the library's kernels are deterministic.

Source: Chen et al. 2016, arXiv:1604.06174; unlike there, `blocks` has one segment per block of convolutions.
"""

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from medconv.performance.checkpoint_pointwise import Recompute
from medconv.utils.errors import ArgumentError

CHECKPOINTING = ("none", "blocks", "pointwise")


def apply_checkpointing(network: nn.Module, mode: str) -> int:
    """Set the mode of a network, in place; returns how many of its modules are checkpointed.

    Raises:
        ValueError: `mode` is not in CHECKPOINTING.
    """
    if mode not in CHECKPOINTING:
        raise ArgumentError("activation_checkpointing", f" must be one of {CHECKPOINTING}, got {mode!r}")
    if mode == "none":
        return 0
    mixin: Any
    if mode == "pointwise":
        candidates = [network]
        mixin = _Pointwise
    else:
        candidates = _blocks(network)
        mixin = _Checkpointed
    modules = [module for module in candidates if not isinstance(module, _Mixin)]
    for module in modules:
        module_class: Any = type(module)
        module.__class__ = _mixed(mixin, module_class)
    return len(modules)


class _Mixin(nn.Module):
    """Mixed into a module's class, so that its children, `deepcopy` and pickling stay as they were."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds no class that was made here, but it finds the two that it was made of
        mixin, module_class = type(self).__bases__
        return _blank, (mixin, module_class), self.__dict__


class _Pointwise(_Mixin):
    """Recomputes cheap operations of the whole network."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_training_step = self.training and torch.is_grad_enabled()
        if torch.compiler.is_compiling() or not is_training_step:
            return super().forward(*args, **kwargs)  # the compiler itself chooses what to keep
        arguments = (*args, *kwargs.values())
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        device = tensors[0].device.type if tensors else "cpu"
        with Recompute(device):
            return super().forward(*args, **kwargs)


class _Checkpointed(_Mixin):
    """Recomputes a block from its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # it supports no contexts, and updates statistics only once
            return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(
            super().forward,
            *args,
            use_reentrant=False,  # reentrant checkpointing would mark DDP's parameters ready twice
            context_fn=self._contexts,
            **kwargs,
        )

    def _contexts(self) -> tuple[Any, Any]:
        """Around the forward pass, and around its recomputation."""
        return nullcontext(), _FrozenStatistics(self)


class _FrozenStatistics:
    """Keeps the recomputation from adding a batch to the running statistics a second time.

    Entered once per backward pass, so more than once where the graph is retained.
    """

    def __init__(self, block: nn.Module) -> None:
        norms = (module for module in block.modules() if isinstance(module, _BatchNorm))
        self._norms = [norm for norm in norms if norm.track_running_stats]

    def __enter__(self) -> None:
        self._saved = [(norm, norm.momentum, norm.num_batches_tracked) for norm in self._norms]
        for norm, _, count in self._saved:
            norm.momentum = 0.0
            norm.num_batches_tracked = None if count is None else count.clone()

    def __exit__(self, *error: object) -> None:
        for norm, momentum, count in self._saved:
            norm.momentum = momentum
            norm.num_batches_tracked = count


@cache
def _mixed(mixin: type, module_class: type) -> Any:
    """The class of a mixin and a module class, created once."""
    name = f"{mixin.__name__.strip('_')}{module_class.__name__}"
    return type(name, (mixin, module_class), {})


def _blank(mixin: type, module_class: type) -> Any:
    """For copying and unpickling: an empty module, whose state is set afterwards."""
    mixed_class = _mixed(mixin, module_class)
    return mixed_class.__new__(mixed_class)


def _blocks(network: nn.Module) -> list[nn.Module]:
    """The smallest modules with two or more convolutions, each once: DynUNet registers them twice."""
    blocks: list[nn.Module] = []
    _collect_blocks(network, blocks)
    return list(dict.fromkeys(blocks))


def _collect_blocks(module: nn.Module, blocks: list[nn.Module]) -> int:
    """Number of spatial convolutions inside; the smallest modules that hold two are appended to `blocks`."""
    if isinstance(module, (nn.Conv2d, nn.Conv3d)):
        is_spatial = any(size > 1 for size in module.kernel_size)
        return int(is_spatial)
    blocks_before = len(blocks)
    convolutions = sum(_collect_blocks(child, blocks) for child in module.children())
    has_smaller_block = len(blocks) > blocks_before
    is_called = not isinstance(module, nn.ModuleList)  # a list has no forward to checkpoint
    if convolutions >= 2 and is_called and not has_smaller_block:
        blocks.append(module)
    return convolutions
