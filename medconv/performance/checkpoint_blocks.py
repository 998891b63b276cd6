"""Activation checkpointing: less memory, because the backward pass recomputes what the forward pass drops.

`blocks` keeps the input of each block and recomputes the whole block. `pointwise` keeps the outputs of
convolutions and recomputes only cheap operations: norms, activations, concatenations and sums
(`medconv.performance.checkpoint_pointwise`). Both give the gradients of the plain network, bit for bit where
the library's kernels are deterministic.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from medconv.performance.checkpoint_pointwise import Recompute

CHECKPOINTING = ("none", "blocks", "pointwise")
_MIXED: dict[tuple[type, type], type[nn.Module]] = {}


def apply_checkpointing(network: nn.Module, mode: str) -> int:
    """Set the mode of a network, in place; returns how many parts of it are checkpointed.

    Raises: ValueError: `mode` is not in CHECKPOINTING.
    """
    if mode not in CHECKPOINTING:
        raise ValueError(f"perf.activation_checkpointing must be one of {CHECKPOINTING}, got {mode!r}")
    if mode == "none":
        return 0
    candidates = [network] if mode == "pointwise" else _blocks(network)
    mixin = _Pointwise if mode == "pointwise" else _Checkpointed
    parts = [part for part in candidates if not isinstance(part, (_Checkpointed, _Pointwise))]
    for part in parts:
        part.__class__ = _mixed(mixin, type(part))
    return len(parts)


class _Mixin(nn.Module):
    """Mixed into a module's class, so that its children, `deepcopy` and pickling stay as they were."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, type(self).__bases__, self.__dict__


class _Pointwise(_Mixin):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)  # the compiler itself chooses what to keep
        device = next((x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), "cpu")
        with Recompute(device):
            return super().forward(*args, **kwargs)


class _Checkpointed(_Mixin):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # it supports no contexts, and updates statistics only once
            return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)
        # Reentrant checkpointing would mark DDP's parameters ready twice.
        return checkpoint(super().forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[Any, Any]:
        return nullcontext(), _FrozenStatistics(self)


class _FrozenStatistics:
    """Keeps the recomputation from adding a batch to the running statistics a second time.

    Entered once per backward pass, so more than once where the graph is retained.
    """

    def __init__(self, block: nn.Module) -> None:
        norms = (m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        self._norms = [norm for norm in norms if norm.track_running_stats]

    def __enter__(self) -> None:
        self._tracked = [(norm, norm.momentum, norm.num_batches_tracked) for norm in self._norms]
        for norm, _, count in self._tracked:
            norm.momentum = 0.0
            norm.num_batches_tracked = None if count is None else count.clone()

    def __exit__(self, *error: object) -> None:
        for norm, momentum, count in self._tracked:
            norm.momentum, norm.num_batches_tracked = momentum, count


def _mixed(mixin: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a mixin and a module class, created once."""
    if (mixin, kind) not in _MIXED:
        _MIXED[mixin, kind] = type(f"{mixin.__name__.strip('_')}{kind.__name__}", (mixin, kind), {})
    return _MIXED[mixin, kind]


def _blank(mixin: type[nn.Module], kind: type[nn.Module]) -> nn.Module:
    """For copying and unpickling: an empty module, whose state is set afterwards."""
    mixed = _mixed(mixin, kind)
    return mixed.__new__(mixed)


def _blocks(network: nn.Module) -> list[nn.Module]:
    """The smallest modules with two or more convolutions, each once: DynUNet registers them twice."""
    blocks: list[nn.Module] = []
    _collect_blocks(network, blocks)
    return list(dict.fromkeys(blocks))


def _collect_blocks(module: nn.Module, blocks: list[nn.Module]) -> int:
    """Number of spatial convolutions inside; the smallest modules that hold two are appended to `blocks`."""
    if isinstance(module, (nn.Conv2d, nn.Conv3d)):
        return int(any(k > 1 for k in module.kernel_size))
    before = len(blocks)
    count = sum(_collect_blocks(child, blocks) for child in module.children())
    if count >= 2 and len(blocks) == before and not isinstance(module, nn.ModuleList):
        blocks.append(module)
    return count
