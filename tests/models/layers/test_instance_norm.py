"""medconv/models/layers/instance_norm.py: the same numbers as torch's instance norm, in channels-last; the
swap; the Triton kernels.

There is no GPU here: the kernels run in Triton's interpreter, and are compiled for a GPU without one.
"""

import multiprocessing
import os
import subprocess
import sys
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from monai.networks.nets import DynUNet
from torch import Tensor, nn

from medconv.models.layers.instance_norm import (
    ChannelsLastInstanceNorm2d,
    ChannelsLastInstanceNorm3d,
    instance_norm,
    swap_norms,
)
from medconv.models.unet import UNet

FORMAT = {4: torch.channels_last, 5: torch.channels_last_3d}
SHAPES = [(2, 5, 7, 4), (3, 6, 4, 5, 3), (1, 4, 3, 2, 5)]
FAST = (ChannelsLastInstanceNorm2d, ChannelsLastInstanceNorm3d)
SLOPES = [None, 0.0, 0.01, -0.3]


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, last: bool = True) -> Tensor:
    x = (2 + 3 * torch.randn(shape, dtype=torch.float64)).to(dtype)
    return x.contiguous(
        memory_format=FORMAT[len(shape)] if last else torch.contiguous_format
    ).requires_grad_()


def torch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, slope: float | None) -> Tensor:
    y = F.instance_norm(x, weight=weight, bias=bias)
    return y if slope is None else F.leaky_relu(y, slope)


def with_gradients(norm, inputs: list[Tensor | None], slope: float | None, grad: Tensor) -> list[Tensor]:
    y = norm(*inputs, slope)
    return [y, *torch.autograd.grad(y, [i for i in inputs if i is not None], grad)]


def ours(x: Tensor, weight: Tensor | None, bias: Tensor | None, slope: float | None) -> Tensor:
    return instance_norm(x, weight, bias, negative_slope=slope)


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("affine", ["both", "scale", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch_in_value_and_every_gradient(
    shape: tuple[int, ...], affine: str, last: bool, slope: float | None
) -> None:
    torch.manual_seed(0)
    x, grad = drawn(shape, last=last), torch.randn(shape, dtype=torch.float64)
    weight = None if affine == "none" else torch.randn(shape[1], dtype=x.dtype, requires_grad=True)
    bias = torch.randn(shape[1], dtype=x.dtype, requires_grad=True) if affine == "both" else None
    for got, wanted in zip(
        with_gradients(ours, [x, weight, bias], slope, grad),
        with_gradients(torch_norm, [x, weight, bias], slope, grad),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_half_precision_with_fp32_weights(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, grad = drawn(shape, dtype), torch.randn(shape).to(dtype)
    weight, bias = torch.randn(shape[1], requires_grad=True), torch.randn(shape[1], requires_grad=True)
    got = with_gradients(ours, [x, weight, bias], 0.01, grad)
    exact = with_gradients(
        torch_norm, [t.detach().double().requires_grad_() for t in (x, weight, bias)], 0.01, grad.double()
    )
    assert [g.dtype for g in got] == [dtype, dtype, torch.float32, torch.float32]
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0.02, atol=0.02 * float(b.detach().abs().max()))


@pytest.mark.parametrize("grad_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradient_stay_channels_last(
    shape: tuple[int, ...], dtype: torch.dtype, grad_last: bool
) -> None:
    x = drawn(shape, dtype)
    y = instance_norm(x, negative_slope=0.01)
    grad = drawn(shape, dtype, last=grad_last).detach()
    y.backward(grad)
    assert y.is_contiguous(memory_format=FORMAT[len(shape)]) and not y.is_contiguous()
    assert x.grad.is_contiguous(memory_format=FORMAT[len(shape)]) and not x.grad.is_contiguous()
    with torch.no_grad():
        assert instance_norm(x).is_contiguous(memory_format=FORMAT[len(shape)])
    assert instance_norm(x.contiguous()).is_contiguous()


def test_a_slice_of_channels_stays_channels_last_too() -> None:
    x = drawn((2, 8, 3, 4, 5))[:, 2:5]
    y = instance_norm(x)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(y, F.instance_norm(x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("slope", [None, 0.1])
def test_gradients_of_first_and_second_order(slope: float | None) -> None:
    torch.manual_seed(2)
    inputs = (drawn((2, 3, 2, 3)), *torch.randn(2, 3, dtype=torch.float64).unbind())
    inputs = tuple(i.detach().clone().requires_grad_() for i in inputs)
    assert inputs[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.autograd.gradcheck(lambda *i: ours(*i, slope), inputs)
    assert torch.autograd.gradgradcheck(lambda *i: ours(*i, slope), inputs)


def test_a_single_voxel_and_an_empty_batch_as_in_torch() -> None:
    for layer, shape in ((nn.InstanceNorm2d(4), (2, 4, 1, 1)), (nn.InstanceNorm3d(4), (2, 4, 1, 1, 1))):
        x = torch.zeros(shape).to(memory_format=FORMAT[len(shape)])
        with pytest.raises(ValueError) as torchs:
            layer(x)
        swapped = nn.Sequential(layer)
        swap_norms(swapped)
        with pytest.raises(ValueError) as error:
            swapped(x)
        assert str(error.value) == str(torchs.value)


def test_an_empty_batch_gives_an_empty_result() -> None:
    x = torch.zeros(0, 4, 2, 3).to(memory_format=torch.channels_last).requires_grad_()
    y = instance_norm(x, torch.ones(4), torch.zeros(4), negative_slope=0.0)
    assert y.shape == x.shape


def test_autocast_gives_the_dtype_that_torch_gives() -> None:
    layer = nn.Sequential(nn.Conv3d(2, 4, 3), nn.InstanceNorm3d(4, affine=True)).to(
        memory_format=torch.channels_last_3d
    )
    x = torch.randn(2, 2, 6, 5, 5).to(memory_format=torch.channels_last_3d)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = layer(x)
        assert swap_norms(layer) == 1
        got = layer(x)
    assert got.dtype == wanted.dtype and got.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("last", [True, False])
def test_compiles_without_a_break(last: bool) -> None:
    layer = nn.Sequential(nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(0.01, inplace=True)).double()
    x, plain = drawn((2, 4, 3, 4, 5), last=last), deepcopy(layer)
    swap_norms(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got, wanted = compiled(x), plain(x)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum(), x)[0] for y in (got, wanted)), rtol=1e-8, atol=1e-8
    )
    assert got.is_contiguous(memory_format=torch.channels_last_3d) == last


def dynunet() -> nn.Module:
    return DynUNet(
        3, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), filters=(4, 8, 8), norm_name=("INSTANCE", {"affine": True})
    )


def medconv_unet(dims: int) -> nn.Module:
    return UNet(dims, 1, 2, (4, 6, 8), (2, 2), norm="instance")


# Network, its axes, the number of norms, and of those that take an activation over.
NETWORKS = {
    "dynunet": (dynunet, 3, 10, 0),
    "unet 3d": (lambda: medconv_unet(3), 3, 10, 10),
    "unet 2d": (lambda: medconv_unet(2), 2, 10, 10),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_swapped_network_is_the_same_network(name: str, training: bool) -> None:
    torch.manual_seed(3)
    build, dims, norms, fused = NETWORKS[name]
    plain = build().double().train(training).to(memory_format=FORMAT[dims + 2])
    for p in plain.parameters():
        p.data += 0.1 * torch.randn_like(p)
    network = deepcopy(plain)
    parameters, modules = dict(network.named_parameters()), dict(network.named_modules())
    assert swap_norms(network) == norms

    assert list(network.state_dict()) == list(plain.state_dict())
    assert all(p is parameters[n] for n, p in network.named_parameters())
    assert list(modules) == [n for n, _ in network.named_modules()]
    assert all(m.training == training for m in network.modules())
    assert not any(type(m) in (nn.InstanceNorm2d, nn.InstanceNorm3d) for m in network.modules())
    assert sum(isinstance(m, FAST) and m.negative_slope == 0.01 for m in network.modules()) == fused
    assert sum(isinstance(m, nn.Identity) for m in network.modules()) == fused + sum(
        isinstance(m, nn.Identity) for m in plain.modules()
    )
    assert all(
        isinstance(m, (nn.InstanceNorm2d, nn.InstanceNorm3d))
        for m in network.modules()
        if isinstance(m, FAST)
    )

    x = drawn((2, 1, *[16] * dims)[: dims + 2])
    for copy in (network, deepcopy(network)):
        copy.load_state_dict(plain.state_dict())
        got, wanted = copy(x), plain(x)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
        grads = [
            torch.autograd.grad(y.square().mean(), [x, *n.parameters()], allow_unused=True)
            for y, n in ((got, copy), (wanted, plain))
        ]
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-6, atol=1e-9)
    assert swap_norms(network) == 0
    torch.testing.assert_close(network(x), wanted, rtol=1e-9, atol=1e-9)


def test_no_norm_of_a_swapped_network_hands_on_a_contiguous_tensor() -> None:
    network = medconv_unet(3).to(memory_format=torch.channels_last_3d)
    swap_norms(network)
    seen = []
    for m in network.modules():
        if isinstance(m, FAST):
            m.register_forward_hook(
                lambda _, __, y: seen.append(y.is_contiguous(memory_format=torch.channels_last_3d))
            )
    network(torch.randn(2, 1, 8, 8, 8).to(memory_format=torch.channels_last_3d))
    assert len(seen) == 10 and all(seen)


def test_running_statistics_and_subclasses_are_left() -> None:
    class Own(nn.InstanceNorm2d):
        pass

    network = nn.Sequential(
        nn.InstanceNorm2d(3, track_running_stats=True), nn.ReLU(), Own(3), nn.ReLU(), nn.InstanceNorm1d(3)
    )
    kinds = [type(m) for m in network]
    assert swap_norms(network) == 0
    assert [type(m) for m in network] == kinds


def test_a_norm_built_with_running_statistics_uses_them() -> None:
    x = drawn((2, 3, 4, 4), torch.float32).detach()
    layer, plain = (
        ChannelsLastInstanceNorm2d(3, track_running_stats=True),
        nn.InstanceNorm2d(3, track_running_stats=True),
    )
    for _ in range(2):
        torch.testing.assert_close(layer(x), plain(x))
        torch.testing.assert_close(layer.running_mean, plain.running_mean)
        layer.eval(), plain.eval()


def test_unbatched_input_and_a_wrong_number_of_channels_as_in_torch() -> None:
    layer = ChannelsLastInstanceNorm3d(3, affine=True)
    layer.negative_slope = 0.0
    x = torch.randn(3, 3, 2, 2)
    torch.testing.assert_close(layer(x), nn.InstanceNorm3d(3, affine=True)(x).relu())
    with pytest.raises(ValueError, match="num_features"):
        layer(torch.randn(2, 4, 3, 3, 3))
    with pytest.raises(ValueError, match="4D or 5D"):
        layer(torch.randn(3, 4))


class Block(nn.Sequential):
    """As ConvBlock is one."""


def twice(norm: nn.Module, act: nn.Module) -> list[nn.Module]:
    return [Block(norm, act), Block(nn.Conv2d(2, 2, 1), act)]


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda *_: None)
    return layer


class Reversed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](self[1](x))


KEPT = {
    "activation elsewhere too": lambda: twice(nn.InstanceNorm2d(2), nn.ReLU()),
    "norm elsewhere too": lambda: [
        Block(n := nn.InstanceNorm2d(2), nn.ReLU()),
        Block(n, nn.Conv2d(2, 2, 1)),
    ],
    "activation hooked": lambda: [Block(nn.InstanceNorm2d(2), hooked(nn.ReLU()))],
    "norm hooked": lambda: [Block(hooked(nn.InstanceNorm2d(2)), nn.ReLU())],
    "forward of its own": lambda: [Reversed(nn.InstanceNorm2d(2), nn.ReLU())],
    "a plain sequential, which others may walk through": lambda: [
        nn.Sequential(nn.InstanceNorm2d(2), nn.ReLU())
    ],
    "something between": lambda: [Block(nn.InstanceNorm2d(2), nn.Conv2d(2, 2, 1), nn.ReLU())],
    "another activation": lambda: [Block(nn.InstanceNorm2d(2), nn.ELU())],
    "no sequential": lambda: [nn.ModuleList([nn.InstanceNorm2d(2), nn.ReLU()])],
}


@pytest.mark.parametrize("name", KEPT)
def test_an_activation_that_cannot_be_taken_over_stays(name: str) -> None:
    network = nn.ModuleList(KEPT[name]())
    before = dict(network.named_modules(remove_duplicate=False))
    assert swap_norms(network) == 1
    assert all(m is before[n] for n, m in network.named_modules(remove_duplicate=False))
    assert all(m.negative_slope is None for m in network.modules() if isinstance(m, FAST))


def test_a_shared_block_is_fused_once_and_fusing_can_wait() -> None:
    block = Block(nn.InstanceNorm2d(2), nn.LeakyReLU(0.2))
    network = Block(block, nn.Conv2d(2, 2, 1), block).double()
    x = drawn((2, 2, 5, 4))
    wanted = network(x)
    assert swap_norms(network, fuse=False) == 1 and isinstance(block[1], nn.LeakyReLU)
    torch.testing.assert_close(network(x), wanted, rtol=1e-9, atol=1e-10)
    assert swap_norms(network) == 0 and isinstance(block[1], nn.Identity) and "0.2" in repr(block[0])
    torch.testing.assert_close(network(x), wanted, rtol=1e-9, atol=1e-10)


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
    given = [x, *weights]
    grad = torch.randn(shape).to(dtype)
    results = []
    for function, kind in ((instance_norm.triton_instance_norm, None), (None, torch.float64)):
        inputs = [None if t is None else t.detach().to(kind or t.dtype).requires_grad_() for t in given]
        if function:
            y = function(*inputs, 1e-5, slope)
        else:
            y = F.instance_norm(inputs[0], weight=inputs[1], bias=inputs[2])
            y = y if slope is None else F.leaky_relu(y, slope)
        results.append([y, *torch.autograd.grad(y, [t for t in inputs if t is not None], grad.to(y.dtype))])
    for got, wanted, like in zip(*results, [x, *(t for t in given if t is not None)], strict=True):
        tolerance = {torch.float64: 1e-11, torch.float32: 5e-5, torch.bfloat16: 1e-2}[dtype]
        error = float(((got.double() - wanted).abs().max() / wanted.abs().max()).detach())
        assert error < tolerance, (shape, dtype, error)
        assert got.dtype == like.dtype and got.stride() == like.stride(), (shape, dtype)
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
    signature = {n: "constexpr" if n in constants else types.get(n, "i64" if n == "places" else precise) for n in kernel.arg_names}
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


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stderr[-3000:]


def _compile(folder: Path) -> None:
    os.environ.update(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder / "cache"))
    exec(COMPILED, {"__name__": "compiled"})
    (folder / "done").touch()


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_compile, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0 and (tmp_path / "done").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [torch.float32, torch.bfloat16, None], ids=str)
def test_without_gradients_it_is_the_same_to_the_last_bit(
    dtype: torch.dtype, affine: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    x = drawn((3, 5, 4, 3, 6), dtype)
    weight, bias = (None, None) if affine is None else torch.rand(2, 5, dtype=affine).unbind()
    if (dtype, affine) == (torch.float32, torch.bfloat16):
        pytest.skip("torch's batch norm has no half-precision weights for fp32")
    wanted = instance_norm(x, weight, bias, negative_slope=0.1)
    with torch.no_grad():
        assert torch.equal(instance_norm(x, weight, bias, negative_slope=0.1), wanted)
