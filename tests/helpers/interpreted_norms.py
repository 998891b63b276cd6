"""The Triton norms against torch, by Triton's interpreter on CPU tensors; a command, since Triton chooses the
interpreter when it is imported:

    TRITON_INTERPRET=1 python -m helpers.interpreted_norms CHECK...
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from helpers.waiting import PATIENCE_S
from monai.networks.nets import SegResNet
from torch import Tensor, nn
from torch.library import opcheck

from medconv.convs.parametrization import CHANNELS_LAST
from medconv.models.freeze import fix_statistics
from medconv.models.layers import fast_norm, triton_norm
from medconv.models.layers.fast_norm import (
    ChannelsLastBatchNorm2d,
    ChannelsLastBatchNorm3d,
    ChannelsLastGroupNorm,
    ChannelsLastNorm,
    swap_norms,
)
from medconv.models.layers.triton_norm import BatchStatistics
from medconv.models.unet import ConvBlock, UNet
from medconv.performance.switches import apply_switches
from medconv.training.callbacks.nonfinite_guard import RunningStatistics

# Shape, dtype, slope, affine, offset: odd sizes, one chunk and many, more channels than a block of columns.
CASES: list[tuple[tuple[int, ...], torch.dtype, float | None, bool, float]] = [
    ((2, 5, 7, 9), torch.float64, 0.01, True, 0),
    ((2, 37, 13, 11), torch.float64, None, False, 0),
    ((1, 70, 3, 5, 7), torch.float64, -0.3, True, 0),
    ((2, 3, 4, 5, 3), torch.bfloat16, 0.0, True, 0),
    ((2, 5, 41, 43), torch.float16, None, True, 1000),
]
TOLERANCES = {torch.float64: 1e-11, torch.float32: 5e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
STATISTICS = ("sample", "groups", "batch", "running")


def run(checks: Sequence[str], folder: Path) -> None:
    """Runs checks of this module in a process of their own, with their cache below `folder`."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-m", "helpers.interpreted_norms", *checks]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert process.returncode == 0, process.stderr[-3000:]


def outputs_and_gradients_equal_torchs() -> None:
    for shape, dtype, slope, affine, offset in CASES:
        torch.manual_seed(0)
        x = _last((torch.randn(shape) + offset).to(dtype))
        x[0, :, 0, 0] = 0  # a first voxel far from all others
        fp = torch.promote_types(dtype, torch.float32)
        affines = list(torch.randn(2, shape[1], dtype=fp).unbind()) if affine else []
        grad = torch.randn(shape).to(dtype)
        for statistics in STATISTICS:
            running = (torch.randn(shape[1], dtype=fp) + offset, torch.rand(shape[1], dtype=fp) + 0.5)
            ours = _with_gradients(_ours, x, affines, slope, statistics, running, grad)
            exact = [tensor.double() for tensor in affines]
            far = (running[0].double(), running[1].double())
            expected = _with_gradients(_torchs, x.double(), exact, slope, statistics, far, grad.double())
            for output, right, like in zip(ours, expected, [x, x, *affines], strict=True):
                error = float((output.double() - right).abs().max() / right.abs().max())
                assert error < TOLERANCES[dtype], (shape, dtype, statistics, error)
                assert output.dtype == like.dtype, (shape, dtype, statistics)
                assert output.stride() == like.stride(), (shape, dtype, statistics)


def _with_gradients(
    norm: Any,
    x: Tensor,
    affines: list[Tensor],
    slope: float | None,
    statistics: str,
    running: tuple[Tensor, Tensor],
    grad: Tensor,
) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (x, *affines)]
    y = norm(leaves[0], *(leaves[1:] or (None, None)), slope, statistics, running)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def _ours(x: Tensor, weight: Any, bias: Any, slope: Any, statistics: str, running: Any) -> Tensor:
    batch = None
    if statistics == "groups":
        return triton_norm.triton_norm(x, weight, bias, 1e-5, slope, groups=_groups(x))
    if statistics != "sample":
        batch = BatchStatistics(*running, momentum=0.1, training=statistics == "batch")
    return triton_norm.triton_norm(x, weight, bias, 1e-5, slope, batch)


def _torchs(x: Tensor, weight: Any, bias: Any, slope: Any, statistics: str, running: Any) -> Tensor:
    if statistics == "sample":
        y = F.instance_norm(x, weight=weight, bias=bias)
    elif statistics == "groups":
        y = F.group_norm(x.contiguous(), _groups(x), weight, bias)
    else:
        y = F.batch_norm(x, *running, weight, bias, training=statistics == "batch")
    return y if slope is None else F.leaky_relu(y, slope)


def _groups(x: Tensor) -> int:
    """One group of all channels where they are a prime number, else several of a few channels."""
    return max(groups for groups in range(1, x.shape[1]) if x.shape[1] % groups == 0)


def networks_with_group_norms_stay_in_channels_last() -> None:
    """SegResNet has steps like torch's; the input of every convolution is channels-last."""
    torch.manual_seed(0)
    plain = SegResNet(2, 8, 3, 2, blocks_down=(1, 2), blocks_up=(1,))
    network = apply_switches(deepcopy(plain), channels_last=True, fast_norm=True)
    norms = [layer for layer in network.modules() if isinstance(layer, ChannelsLastGroupNorm)]
    assert len(norms) == sum(isinstance(layer, nn.GroupNorm) for layer in plain.modules()) == 9
    formats = []
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_pre_hook(lambda _, args: formats.append(_is_last(args[0])))
    x = _last(torch.randn(2, 3, 8, 12))
    gradients = [
        torch.autograd.grad(net(x).square().mean(), list(net.parameters())) for net in (network, plain)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    assert formats and all(formats), formats


def _is_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=CHANNELS_LAST[x.ndim])


def layers_track_statistics_as_torchs() -> None:
    torch.manual_seed(0)
    arguments: list[dict[str, Any]] = [
        {},
        {"momentum": 0.7, "eps": 0.5},
        {"momentum": None},  # torch's own
        {"affine": False},
        {"track_running_stats": False},
    ]
    planar = (ChannelsLastBatchNorm2d, nn.BatchNorm2d, (3, 6, 4, 5))
    spatial = (ChannelsLastBatchNorm3d, nn.BatchNorm3d, (2, 6, 3, 4, 5))
    for settings in arguments:
        for fast_class, plain_class, shape in (planar, spatial) if not settings else (planar,):
            plain: nn.Module = plain_class(6, **settings)
            layer: nn.Module = fast_class(6, **settings)
            layer.load_state_dict(plain.state_dict())
            buffers = dict(layer.named_buffers())
            for is_training in (True, True, False):
                x = _last(3 * torch.randn(shape) + 1)
                assert fast_norm.uses_triton(x)
                expected = plain.train(is_training)(x)
                torch.testing.assert_close(layer.train(is_training)(x), expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(layer.state_dict(), plain.state_dict())
            for norm in (plain, layer):  # switched off later, the statistics stay, and serve evaluation
                norm.track_running_stats = False
            for is_training in (True, False):
                torch.testing.assert_close(layer.train(is_training)(x), plain.train(is_training)(x))
            torch.testing.assert_close(layer.state_dict(), plain.state_dict())
            layer.track_running_stats = True
            # averaging and `RunningStatistics` hold the buffers themselves
            assert all(buffer is buffers[name] for name, buffer in layer.named_buffers())
            _check_restoring(layer, x)


def _check_restoring(layer: nn.Module, x: Tensor) -> None:
    """A skipped step leaves the running statistics as they were; fixed ones stay."""
    statistics = RunningStatistics(layer)
    saved = statistics.now()
    before = deepcopy(layer.state_dict())
    layer.train()(x)
    if saved:
        assert any(not torch.equal(value, before[name]) for name, value in layer.state_dict().items())
        statistics.restore(saved)
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    fix_statistics(layer)
    layer.train()(x)
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)


def half_precision_layers_work() -> None:
    """All in bf16, as `trainer.precision=bf16-true` has it."""
    plain = nn.BatchNorm3d(4).to(torch.bfloat16)
    layer = ChannelsLastBatchNorm3d(4).to(torch.bfloat16)
    x = _last(torch.randn(2, 4, 3, 4, 5)).to(torch.bfloat16)
    torch.testing.assert_close(layer(x), plain(x), rtol=0.02, atol=0.02)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=0.02, atol=0.02)


def single_values_are_an_error() -> None:
    """Batch norm of one voxel of one sample in training, as in torch."""
    layer = ChannelsLastBatchNorm3d(8)
    x = torch.randn(1, 8, 1, 1, 1).as_strided((1, 8, 1, 1, 1), (8, 1, 8, 8, 8))
    messages = []
    for norm in (layer, nn.BatchNorm3d(8)):
        try:
            norm(x)
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) == 2 and messages[0] == messages[1], messages
    # one more sample than a launch has programs along an axis
    assert not fast_norm.uses_triton(_last(torch.empty(65536, 2, 1, 2, device="meta")))


def networks_train_as_torchs() -> None:
    """Also with activation checkpointing: running statistics take each batch once."""
    torch.manual_seed(0)
    plain = UNet(3, 1, 2, (4, 8), (2,), norm="batch")
    x = _last(torch.randn(2, 1, 4, 8, 8))
    expected = _step(plain, x)
    for mode in ("none", "blocks", "pointwise"):
        network = deepcopy(plain)
        network.load_state_dict(_START)
        apply_switches(network, channels_last=True, fast_norm=True, activation_checkpointing=mode)
        norms = [layer for layer in network.modules() if isinstance(layer, ChannelsLastNorm)]
        assert len(norms) == 6 and all(norm.negative_slope == 0.01 for norm in norms)
        torch.testing.assert_close(_step(network, x), expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(network.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
        network.eval(), plain.eval()
        torch.testing.assert_close(network(x), plain(x), rtol=1e-3, atol=1e-4)
        plain.train()


_START: dict[str, Any] = {}


def _step(network: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of a step; remembers the state before the first."""
    if not _START:
        _START.update(deepcopy(network.state_dict()))
    loss = network(x).square().mean()
    return list(torch.autograd.grad(loss, list(network.parameters())))


def operators_are_sound() -> None:
    """Also compiled as one graph, with running statistics; a second derivative is an error."""
    torch.manual_seed(0)
    x = _last(torch.randn(2, 3, 4, 5)).requires_grad_()
    affine = (torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True))
    opcheck(triton_norm._operator, (x, *affine, None, None, 1e-5, 0.01, False, 0))
    opcheck(triton_norm._operator, (x, *affine, None, None, 1e-5, 0.01, False, 1))
    opcheck(triton_norm._operator, (x, *affine, None, None, 1e-5, 0.01, True, 0))
    opcheck(triton_norm._operator, (x, *affine, torch.randn(3), torch.rand(3), 1e-5, 0.01, True, 0))
    block = ConvBlock(2, (3, 4), (3, 3), "batch").to(memory_format=torch.channels_last)
    assert swap_norms(block) == 1
    plain = deepcopy(block)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), plain(x))
    torch.testing.assert_close(block.state_dict(), plain.state_dict())
    y = triton_norm.triton_norm(x, *affine, 1e-5, 0.01, BatchStatistics())
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    try:
        torch.autograd.grad(first.sum(), x)
    except RuntimeError:
        return
    raise AssertionError("a second derivative needs an error")


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=CHANNELS_LAST[x.ndim])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
