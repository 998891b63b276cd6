"""Bytes of tensors that are alive: on a CPU counted from the operations, without the allocator's rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts the tensors that the block created and that are still alive; not earlier ones, such as
    parameters.

    Tensors inside a compiled graph are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: set[int] = set()

    def bytes_alive(self) -> int:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        return sum(size for _, size in self._alive.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        storages = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self._before |= storages - self._alive.keys()
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._before:
                    self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak_bytes = max(self.peak_bytes, self.bytes_alive())
        return result


def step_memory(
    forward: Callable[[], Tensor], step: Callable[[], Any], device: torch.device
) -> dict[str, int]:
    """`saved_bytes`: alive between forward and backward. `peak_bytes`: the most at any time of a whole step.

    On CUDA both are the allocator's, less what was allocated before.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        loss = forward()
        saved = torch.cuda.memory_allocated(device) - before
        del loss
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return {"saved_bytes": saved, "peak_bytes": torch.cuda.max_memory_allocated(device) - before}
    with LiveTensors() as forward_only:
        loss = forward()
        saved = forward_only.bytes_alive()
    del loss
    with LiveTensors() as whole:
        step()
    return {"saved_bytes": saved, "peak_bytes": whole.peak_bytes}
