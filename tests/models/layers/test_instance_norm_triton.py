"""medconv/models/layers/instance_norm_triton.py: the kernels run in Triton's interpreter, and are compiled
for a GPU, without one.
"""

import multiprocessing
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

# Odd sizes, one chunk and many, more channels than a block of columns; (shape, dtype, slope, affine).
INTERPRETED = """
import torch, torch.nn.functional as F
from torch.library import opcheck
from medconv.models.layers import instance_norm, instance_norm_triton
FORMAT = {4: torch.channels_last, 5: torch.channels_last_3d}
CASES = [
    ((2, 5, 7, 9), torch.float64, 0.01, True, 0),
    ((2, 37, 33, 21), torch.float64, None, False, 0),
    ((1, 70, 3, 5, 7), torch.float64, -0.3, True, 0),
    ((2, 3, 4, 5, 3), torch.bfloat16, 0.0, True, 0),
    ((2, 5, 41, 43), torch.float32, None, True, 1000),
]
for shape, dtype, slope, affine, offset in CASES:
    torch.manual_seed(0)
    x = (torch.randn(shape) + offset).to(dtype).to(memory_format=FORMAT[len(shape)])
    x[0, :, 0, 0] = 0  # a first voxel far from all others
    weights = [torch.randn(shape[1], dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2)] if affine else [None] * 2
    arguments = [x, *weights]
    grad = torch.randn(shape).to(dtype)
    results = []
    for function, kind in ((instance_norm.triton_instance_norm, None), (None, torch.float64)):
        inputs = [None if t is None else t.detach().to(kind or t.dtype).requires_grad_() for t in arguments]
        if function:
            y = function(*inputs, 1e-5, slope)
        else:
            y = F.instance_norm(inputs[0], weight=inputs[1], bias=inputs[2])
            y = y if slope is None else F.leaky_relu(y, slope)
        results.append([y, *torch.autograd.grad(y, [t for t in inputs if t is not None], grad.to(y.dtype))])
    for output, expected, like in zip(*results, [x, *(t for t in arguments if t is not None)], strict=True):
        tolerance = {torch.float64: 1e-11, torch.float32: 5e-5, torch.bfloat16: 1e-2}[dtype]
        error = float(((output.double() - expected).abs().max() / expected.abs().max()).detach())
        assert error < tolerance, (shape, dtype, error)
        assert output.dtype == like.dtype and output.stride() == like.stride(), (shape, dtype)
chunks = [instance_norm_triton._Plan(torch.empty(shape)).chunks for shape, *_ in CASES]
assert min(chunks) == 1 and max(chunks) > 2, chunks
x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
args = (x, torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True), 1e-5, 0.01)
opcheck(instance_norm._forward, args)
compiled = torch.compile(instance_norm.triton_instance_norm, backend="aot_eager", fullgraph=True)
assert torch.equal(compiled(*args), instance_norm.triton_instance_norm(*args))
try:
    torch.autograd.grad(torch.autograd.grad(compiled(*args).square().sum(), x, create_graph=True)[0].sum(), x)
except RuntimeError:
    print("done")
"""

COMPILED = """
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from medconv.models.layers import instance_norm_triton as k
def built(kernel, dtype, constants):
    precise = "*fp64" if dtype == "fp64" else "*fp32"
    types = {n: "*" + dtype for n in ("x", "y", "grad", "dx")} | {n: "i32" for n in ("channels", "chunks", "steps", "length")}
    signature = {n: "constexpr" if n in constants else types.get(n, "i64" if n == "voxels" else precise) for n in kernel.arg_names}
    indices = {(i,): constants[n] for i, n in enumerate(kernel.arg_names) if n in constants}
    compile(ASTSource(fn=kernel, signature=signature, constexprs=indices), target=GPUTarget("cuda", 90, 32))
for dtype in ("bf16", "fp64"):
    tile = {"ROWS": 32, "COLS": 64, "ACC": tl.float64 if dtype == "fp64" else tl.float32}
    for extra in ({"SLOPE": 0.01}, {"SLOPE": None, "weight": None, "bias": None, "steps": 1}):
        for kernel in (k._moments, k._normalise, k._slopes, k._input_gradient):
            built(kernel, dtype, tile | {n: v for n, v in extra.items() if n in kernel.arg_names})
    built(k._merge, dtype, {"EPS": 1e-5, "CHUNKS": 512, "COLS": 8, "ACC": tile["ACC"]})
    built(k._merge, dtype, {"EPS": 1e-5, "CHUNKS": 1, "COLS": 8, "ACC": tile["ACC"], "chunks": 1})
"""


def test_the_kernels_equal_torch_in_the_interpreter(tmp_path: Path) -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0 and process.stdout.strip() == "done", process.stderr[-3000:]


def _compile(folder: Path) -> None:
    os.environ.update(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder / "cache"))
    exec(COMPILED, {"__name__": "compiled"})
    (folder / "done").touch()


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_compile, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0 and (tmp_path / "done").exists()
