"""The Triton kernels of the norms against torch's in double precision; also a command, since the
interpreter of Triton must be chosen before Triton is imported.

    TRITON_INTERPRET=1 python -m gpu_checks.norm
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from medconv.convs.parametrization import CHANNELS_LAST
from medconv.models.layers.fast_norm import norm_by_sample
from medconv.models.layers.triton_norm import BatchStatistics, triton_norm

EPS = 1e-5
TINY = [((2, 5, 7, 9), -0.3), ((1, 70, 3, 5, 7), 0.01), ((2, 3, 4, 5, 3), None)]
# Stages of U-Nets, odd sizes, more channels than a block of columns.
FULL = [
    *TINY,
    *(((2, channels, 40 // n, 56 // n, 40 // n), 0.01) for channels, n in ((32, 1), (64, 2), (320, 8))),
    *(((4, channels, 128 // n, 128 // n, 128 // n), 0.01) for channels, n in ((32, 1), (256, 8), (320, 32))),
    ((12, 33, 255, 257), 0.0),
    ((1, 1, 513, 517), None),
]
# Instance norm, batch norm
_BATCHES = (None, BatchStatistics())
Shape = tuple[int, ...]


def errors(device: torch.device, tiny: bool) -> dict[str, float]:
    """The largest relative error (norm of the difference over the norm) of outputs and gradients, by dtype.

    Single values say nothing: where an activation's input rounds to another sign, its gradient is another.
    """
    found: dict[str, float] = {}
    half = [torch.bfloat16] if tiny else [torch.bfloat16, torch.float16]
    for shape, slope in TINY if tiny else FULL:
        for dtype in (torch.float32, *half):
            inputs = _inputs(shape, dtype, device)
            name = f"error in {str(dtype).removeprefix('torch.')}"
            print(name, shape, slope, flush=True)
            for batch in _BATCHES:
                error = _error(_by_triton(inputs, slope, batch), _reference(inputs, slope, batch))
                found[name] = max(found.get(name, 0.0), error)
            if dtype == torch.float32 and slope is None:
                y = norm_by_sample(inputs[0], inputs[1], inputs[2], EPS)
                found["error without Triton"] = _error([y], _reference(inputs, slope, None)[:1])
    return found


def interpreted() -> dict[str, float]:
    """The errors of the tiny form by Triton's interpreter, on the CPU, in a process of its own.

    Raises: RuntimeError: it failed.
    """
    paths = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "gpu_checks.norm"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout + done.stderr, flush=True)
    if done.returncode:
        raise RuntimeError(f"TRITON_INTERPRET=1 {' '.join(command)} ended with code {done.returncode}")
    return {name: float(value) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


def _inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    x = (
        (2 + 3 * torch.randn(shape, device=device))
        .to(dtype)
        .contiguous(memory_format=CHANNELS_LAST[len(shape)])
    )
    weights = torch.randn(2, shape[1], device=device).unbind()
    return [x, *weights, torch.randn(shape, device=device).to(dtype)]


def _by_triton(inputs: Sequence[Tensor], slope: float | None, batch: BatchStatistics | None) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    y = triton_norm(leaves[0], leaves[1], leaves[2], EPS, slope, batch)
    assert y.is_contiguous(memory_format=CHANNELS_LAST[y.ndim]), (y.shape, y.stride())
    return [y, *torch.autograd.grad(y, leaves, inputs[3])]


def _reference(inputs: Sequence[Tensor], slope: float | None, batch: BatchStatistics | None) -> list[Tensor]:
    """In double precision, by torch."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs[:3]]
    x, weight, bias = leaves
    if batch is None:
        y = F.instance_norm(x, weight=weight, bias=bias, eps=EPS)
    else:
        y = F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    y = y if slope is None else F.leaky_relu(y, slope)
    return [y.detach(), *torch.autograd.grad(y, leaves, inputs[3].double())]


def _error(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = zip(outputs, expected, strict=True)
    return max(
        float((output.double() - right).norm() / right.norm().clamp(min=1e-12)) for output, right in pairs
    )


if __name__ == "__main__":
    print(json.dumps(errors(torch.device("cpu"), tiny=True)))
