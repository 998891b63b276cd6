"""Copies to a device beside the work that is queued on it."""

from collections.abc import Mapping

import torch
from torch import Tensor


class DeviceCopies:
    """Copies tensors to a device; to CUDA on a stream of their own, so that they overlap with computing.

    On the stream that computes, a copy would begin only when all work queued before it has ended.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Copies, which work that is queued from now on may use. Args: tensors: in pinned memory for CUDA."""
        if device.type != "cuda":
            return {name: tensor.to(device) for name, tensor in tensors.items()}
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        computing = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._stream):
            copies = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        computing.wait_stream(self._stream)
        for copy in copies.values():
            # Else its memory, once freed, would at once take the next copy, while it may still be read
            copy.record_stream(computing)
        return copies
