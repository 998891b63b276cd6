"""Instance norm that keeps channels-last, optionally fused with a (leaky) ReLU, and its swap in networks.

`nn.InstanceNorm2d/3d` return a contiguous tensor for a channels-last one (pytorch#59168): every convolution
around them then copies its input. Triton does the work on a GPU, batch norm sample by sample elsewhere.
"""

import os
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from shutil import which
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from medconv.convs.parametrization import CHANNELS_LAST

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Triton needs a C compiler where it runs.
_HAS_TRITON = find_spec("triton") is not None and any((os.environ.get("CC"), which("gcc"), which("clang")))


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    negative_slope: float | None = None,
) -> Tensor:
    """Each channel of each sample to mean 0 and variance 1, then scale, shift and activation.

    Statistics are fp32, fp64 for fp64. On a GPU with Triton it can be differentiated once, elsewhere twice.
    Shape: x (N, C, *spatial), weight and bias (C,) -> (N, C, *spatial), dtype and memory format of x.
    Args: negative_slope: of a leaky ReLU; 0 is a ReLU, None no activation.
    Raises: ValueError: a single voxel, as `nn.InstanceNorm3d` does.
    Source: Ulyanov et al. 2016, arXiv:1607.08022.
    """
    # also a slice of a channels-last tensor; not where both formats are the same
    channels_last = x.ndim in CHANNELS_LAST and x.stride(1) == 1 and not x.is_contiguous()
    if not x.shape[0]:  # torch fails on weights here
        y = F.instance_norm(x, eps=eps)
    elif not channels_last:
        y = F.instance_norm(x, weight=weight, bias=bias, eps=eps)
    elif _HAS_TRITON and x.is_cuda and x.dtype in _DTYPES:
        return triton_instance_norm(x, weight, bias, eps, negative_slope)
    else:
        y = norm_by_sample(x.contiguous(memory_format=CHANNELS_LAST[x.ndim]), weight, bias, eps)
    return _activated(y, negative_slope)


def norm_by_sample(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`instance_norm` of a dense channels-last tensor, as batch norm of one sample at a time.

    Group norm would be one call, but its channels-last backward is many times slower on a CPU.
    """
    if not torch.compiler.is_compiling() and has_torch_function((x,)):  # so that a mode sees one operation
        return handle_torch_function(norm_by_sample, (x,), x, weight, bias, eps)
    differentiates = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if differentiates or x.is_cuda or x.numel() == x.shape[0] * x.shape[1]:
        samples = [F.batch_norm(sample, None, None, weight, bias, True, 0.0, eps) for sample in x.split(1)]
        return torch.cat(samples) if len(samples) > 1 else samples[0]
    dtype = next(tensor for tensor in (weight, bias, x) if tensor is not None).dtype
    y, statistics = torch.empty_like(x), x.new_empty(2, x.shape[1], dtype=dtype)
    for source, target in zip(x.split(1), y.split(1), strict=True):
        torch.native_batch_norm(source, weight, bias, None, None, True, 0.0, eps, out=(target, *statistics))
    return y


def triton_instance_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, negative_slope: float | None
) -> Tensor:
    """`instance_norm` by Triton kernels (`instance_norm_triton`); the output is always channels-last.

    Saves x and its statistics for the backward, not the output. CPU tensors only under TRITON_INTERPRET=1.
    """
    if not torch.compiler.is_compiling() and has_torch_function((x,)):
        return handle_torch_function(triton_instance_norm, (x,), x, weight, bias, eps, negative_slope)
    y: Tensor = _forward(x, weight, bias, eps, negative_slope)[0]
    return y


class _ChannelsLast(nn.Module):
    """`instance_norm` as forward; torch's for unbatched input, running statistics and errors."""

    negative_slope: float | None = None

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        batched = input.ndim == layer._get_no_batch_dim() + 1 and input.shape[1] == layer.num_features
        if not batched or layer.track_running_stats:
            return _activated(super().forward(input), self.negative_slope)
        return instance_norm(input, layer.weight, layer.bias, layer.eps, self.negative_slope)

    def extra_repr(self) -> str:
        activation = "" if self.negative_slope is None else f", negative_slope={self.negative_slope}"
        return super().extra_repr() + activation


class ChannelsLastInstanceNorm2d(_ChannelsLast, nn.InstanceNorm2d):
    """`nn.InstanceNorm2d` that keeps channels-last; with a leaky ReLU if `negative_slope` is set."""


class ChannelsLastInstanceNorm3d(_ChannelsLast, nn.InstanceNorm3d):
    """`nn.InstanceNorm3d` that keeps channels-last; with a leaky ReLU if `negative_slope` is set."""


_SWAPS: dict[type, type] = {
    nn.InstanceNorm2d: ChannelsLastInstanceNorm2d,
    nn.InstanceNorm3d: ChannelsLastInstanceNorm3d,
}


def swap_norms(network: nn.Module, fuse: bool = True) -> int:
    """Make every `nn.InstanceNorm2d/3d` of a network keep channels-last, in place; returns their number.

    Parameters, state dict and training flags stay. Norms with running statistics or a forward of their own
    are not changed.
    Args: fuse: move a ReLU or leaky ReLU that follows such a norm into it and replace it by `nn.Identity`;
        only in subclasses of `nn.Sequential`, because others may iterate over a plain one, and only if
        neither layer is used elsewhere or has hooks.
    """
    norms: list[Any] = [m for m in network.modules() if type(m) in _SWAPS and _is_untouched(m)]
    norms = [norm for norm in norms if not norm.track_running_stats]
    for norm in norms:
        norm.__class__ = _SWAPS[type(norm)]
    if fuse:
        places = Counter(id(child) for parent in network.modules() for child in parent._modules.values())
        for parent in network.modules():
            if isinstance(parent, nn.Sequential) and _is_block(parent):
                _fuse(parent, places)
    return len(norms)


def _fuse(parent: nn.Sequential, places: Counter[int]) -> None:
    for (_, norm), (name, after) in pairwise(list(parent._modules.items())):
        bare = isinstance(norm, _ChannelsLast) and norm.negative_slope is None
        if not bare or type(after) not in (nn.LeakyReLU, nn.ReLU):
            continue
        if all(places[id(m)] == 1 and _is_untouched(m) and not _has_hooks(m) for m in (norm, after)):
            norm.negative_slope = float(getattr(after, "negative_slope", 0.0))  # type: ignore[assignment]
            parent._modules[name] = nn.Identity().train(after.training)


def _is_block(parent: nn.Sequential) -> bool:
    kind = type(parent)
    unchanged = kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__
    return kind is not nn.Sequential and unchanged and _is_untouched(parent)


def _is_untouched(layer: nn.Module) -> bool:
    """No forward was put on the object itself."""
    return "forward" not in vars(layer)


def _has_hooks(layer: Any) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(layer, kind, None) for kind in kinds)


def _activated(x: Tensor, negative_slope: float | None) -> Tensor:
    if negative_slope is None:
        return x
    # In place, as x is ours; torch cannot undo it for a slope below zero.
    return F.leaky_relu(x, negative_slope, inplace=negative_slope >= 0)


@torch.library.custom_op("medconv::instance_norm", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, negative_slope: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    from medconv.models.layers import instance_norm_triton

    return instance_norm_triton.forward(x, weight, bias, eps, negative_slope)


@torch.library.custom_op("medconv::instance_norm_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    negative_slope: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from medconv.models.layers import instance_norm_triton

    return instance_norm_triton.backward(grad, x, mean, rstd, weight, bias, negative_slope)


@_forward.register_fake
def _(x: Tensor, weight: Any, bias: Any, eps: float, negative_slope: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x, memory_format=CHANNELS_LAST[x.ndim])
    return y, x.new_empty(x.shape[:2], dtype=dtype), x.new_empty(x.shape[:2], dtype=dtype)


@_backward.register_fake
def _(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Any, bias: Any, negative_slope: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=CHANNELS_LAST[x.ndim])
    return dx, mean.new_empty(x.shape[1:2]), mean.new_empty(x.shape[1:2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, _, ctx.negative_slope = inputs
    ctx.save_for_backward(x, output[1], output[2], weight, bias)


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, mean, rstd, weight, bias = ctx.saved_tensors
    dx, scale, shift = _backward(grad, x, mean, rstd, weight, bias, ctx.negative_slope)
    dweight = None if weight is None else scale.to(weight.dtype)
    dbias = None if bias is None else shift.to(bias.dtype)
    return dx, dweight, dbias, None, None


_forward.register_autograd(_gradients, setup_context=_keep)
