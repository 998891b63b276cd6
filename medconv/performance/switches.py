"""What a config may switch on a network for speed or memory, without changing what it computes or its parameter names."""

from __future__ import annotations

import logging
import shutil
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHECKPOINTING = ("none", "blocks")

log = logging.getLogger(__name__)


def apply_switches(network: nn.Module, *, channels_last: bool, compile: bool, checkpointing: str) -> nn.Module:
    """Switch a network, in place.

    Args:
        channels_last: weights in `torch.channels_last` or `channels_last_3d`; inputs follow, see `memory_format`.
        compile: `torch.compile` in place, so that parameter names stay.
        checkpointing: `blocks` recomputes the inside of every block in the backward pass.
    Raises: ValueError: an unknown checkpointing mode, or `compile` without a compiler.
    """
    if checkpointing not in CHECKPOINTING:
        raise ValueError(f"perf.checkpointing must be one of {CHECKPOINTING}, got {checkpointing!r}")
    if channels_last:
        _to_channels_last(network)
    if checkpointing == "blocks":
        log.info("checkpointing %d blocks", checkpoint_blocks(network))
    if compile:
        _need_compiler()
        network.compile()
    return network


def memory_format(channels_last: bool, spatial_dims: int) -> torch.memory_format:
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last_3d if spatial_dims == 3 else torch.channels_last


def resolve_precision(precision: Any, accelerator: str) -> Any:
    """Lightning's `trainer.precision`, with `auto`: bf16 mixed where the hardware is fast at it, else fp32.

    Raises: ValueError: fp16 on a CPU, which has no fast fp16 convolutions.
    """
    gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if not gpu and str(precision).startswith("16"):
        raise ValueError(f"trainer.precision={precision} needs a GPU; on a CPU take bf16-mixed or 32-true")
    if precision != "auto":
        return precision
    if gpu:
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
    fast = torch.cpu.get_capabilities()
    return "bf16-mixed" if fast.get("amx_bf16") or fast.get("avx512_bf16") else "32-true"


def warn_slow_cudnn() -> None:
    """cuDNN 9.8 to 9.14 runs fp16 and bf16 Conv3d about four times slower on contiguous input (pytorch#166122)."""
    version = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    if version is not None and 90800 <= version < 91500:
        log.warning("cuDNN %d has slow half-precision Conv3d on contiguous input: keep perf.channels_last=true", version)


def checkpoint_blocks(network: nn.Module) -> int:
    """Checkpoint, in place, the smallest modules that hold two or more convolutions; returns how many."""
    blocks: list[nn.Module] = []
    _collect_blocks(network, blocks)
    blocks = [block for block in dict.fromkeys(blocks) if not isinstance(block, _Checkpointed)]  # DynUNet has them twice
    for block in blocks:
        block.__class__ = type(f"Checkpointed{type(block).__name__}", (_Checkpointed, type(block)), {})
    return len(blocks)


class _Checkpointed(nn.Module):
    """Mixed into a block's class, so that its name, its children and `deepcopy` stay as they were."""

    def forward(self, *args: Tensor) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args)
        if torch.compiler.is_compiling():  # the compiler takes no contexts, and updates statistics once by itself
            return checkpoint(super().forward, *args, use_reentrant=False)
        # Reentrant checkpointing would mark DDP's parameters ready twice.
        return checkpoint(super().forward, *args, use_reentrant=False, context_fn=self._contexts)

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


def _collect_blocks(module: nn.Module, blocks: list[nn.Module]) -> int:
    """Number of spatial convolutions inside; the smallest modules that hold two are appended to `blocks`."""
    if isinstance(module, (nn.Conv2d, nn.Conv3d)):
        return int(any(k > 1 for k in module.kernel_size))
    before = len(blocks)
    count = sum(_collect_blocks(child, blocks) for child in module.children())
    if count >= 2 and len(blocks) == before and not isinstance(module, nn.ModuleList):
        blocks.append(module)
    return count


def _to_channels_last(network: nn.Module) -> None:
    """Per convolution: one network may hold 2D and 3D weights."""
    for layer in network.modules():
        if isinstance(layer, (nn.Conv3d, nn.ConvTranspose3d)):
            layer.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        elif isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
            layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _need_compiler() -> None:
    if not torch.cuda.is_available() and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        raise ValueError("perf.compile=true needs a C++ compiler (g++ or clang++) on this machine, found none")
