"""What an error is mended from: its traceback, the tensors of its frames, the sizes of its training."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

import torch
from omegaconf import OmegaConf

_FRAMES = 4  # innermost ones whose tensors are described
_SIZES = (
    *("data.patch_size", "data.batch_size", "data.spacing_mm", "plan.channels", "plan.strides"),
    *("trainer.precision", "perf.compile"),
)


def failure(error: BaseException) -> str:
    """The error with its traceback, and the tensors of the innermost frames."""
    lines = "".join(traceback.format_exception(error, limit=-12))
    return lines + "\n".join(_tensors(_first(error).__traceback__)[-_FRAMES:])


def _first(error: BaseException) -> BaseException:
    """The error that led to this one, whose frames have the tensors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _tensors(trace: TracebackType | None) -> list[str]:
    """Per frame, its local tensors."""
    frames = []
    while trace is not None:
        names = trace.tb_frame.f_locals.items()
        shown = [f"{name}: {described(value)}" for name, value in names if isinstance(value, torch.Tensor)]
        if shown:
            frames.append(f"in {trace.tb_frame.f_code.co_name}: " + "; ".join(shown))
        trace = trace.tb_next
    return frames


def described(tensor: torch.Tensor) -> str:
    shape, kind = "x".join(map(str, tensor.shape)) or "scalar", str(tensor.dtype).removeprefix("torch.")
    strides = "" if tensor.is_contiguous() else f" strides {tuple(tensor.stride())}"
    return f"{shape} {kind} {tensor.device}{strides}"


def sizes(folder: Path) -> str:
    """Of the training in this run's folder; nothing if it came not so far."""
    file = folder / "config.yaml"
    if not file.is_file():
        return ""
    config = OmegaConf.load(file)
    return "; ".join(f"{key}={OmegaConf.select(config, key)}" for key in _SIZES)
