"""Activation activation_checkpointing: what the forward pass need not keep, because the backward pass can
compute it again.

`blocks` keeps what goes into each block and runs the whole block again. `pointwise` keeps what the
convolutions give
and computes again only what is cheap: norms, activations, concatenations and sums
(`medconv.performance.checkpoint_pointwise`). Both give the gradients of the plain network, bit for bit where
the library's kernels are deterministic.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from medconv.performance.checkpoint_pointwise import Recompute

CHECKPOINTING = ("none", "blocks", "pointwise")
_MIXED: dict[tuple[type, type], type[nn.Module]] = {}


def apply_checkpointing(network: nn.Module, mode: str) -> int:
    """Switch a network, in place; returns how many parts of it are checkpointed.

    Raises: ValueError: `mode` is none of CHECKPOINTING.
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
    """Mixed into a module's class, so that its name, its children, `deepcopy` and pickling stay as they
    were.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, type(self).__bases__, self.__dict__


class _Pointwise(_Mixin):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)  # the compiler weighs by itself what to keep
        device = next((x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), "cpu")
        with Recompute(device):
            return super().forward(*args, **kwargs)


class _Checkpointed(_Mixin):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        if (
            torch.compiler.is_compiling()
        ):  # the compiler takes no contexts, and updates statistics once by itself
            return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)
        # Reentrant checkpointing would mark DDP's parameters ready twice.
        return checkpoint(super().forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[Any, Any]:
        return nullcontext(), _FrozenStatistics(self)


class _FrozenStatistics:
    """The recomputation must not count a batch into the running statistics a second time.

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
    """Always the same class of the same two."""
    if (mixin, kind) not in _MIXED:
        _MIXED[mixin, kind] = type(f"{mixin.__name__.strip('_')}{kind.__name__}", (mixin, kind), {})
    return _MIXED[mixin, kind]


def _blank(mixin: type[nn.Module], kind: type[nn.Module]) -> nn.Module:
    """For copying and unpickling: the module before its state is put in."""
    mixed = _mixed(mixin, kind)
    return mixed.__new__(mixed)


def _blocks(network: nn.Module) -> list[nn.Module]:
    """The smallest modules that hold two or more convolutions, each once: DynUNet has them twice."""
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
