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

_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Triton needs a C compiler where it runs.
_HAS_COMPILER = any((os.environ.get("CC"), which("gcc"), which("clang")))
_HAS_TRITON = find_spec("triton") is not None and _HAS_COMPILER


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    negative_slope: float | None = None,
) -> Tensor:
    """Each channel of each sample to mean 0 and variance 1, then scale, shift and activation.

    Statistics are fp32, fp64 for fp64. On a GPU with Triton it can be differentiated once, elsewhere twice.

    Shape:
        x (N, C, *spatial), weight and bias (C,) -> (N, C, *spatial), dtype and memory format of x.
    Args:
        eps: added to the variance.
        negative_slope: of a leaky ReLU; 0 is a ReLU, None no activation.
    Raises:
        ValueError: a single voxel, as `nn.InstanceNorm3d` does.
    Source: Ulyanov et al. 2016, arXiv:1607.08022.
    """
    # also a slice of a channels-last tensor; not where both formats are the same
    is_channels_last = x.ndim in CHANNELS_LAST and x.stride(1) == 1 and not x.is_contiguous()
    is_empty = x.shape[0] == 0
    if is_channels_last and not is_empty and _HAS_TRITON and x.is_cuda and x.dtype in _TRITON_DTYPES:
        return triton_instance_norm(x, weight, bias, eps, negative_slope)
    if is_empty:  # torch fails on weights here
        y = F.instance_norm(x, eps=eps)
    elif is_channels_last:
        dense = x.contiguous(memory_format=CHANNELS_LAST[x.ndim])
        y = norm_by_sample(dense, weight, bias, eps)
    else:
        y = F.instance_norm(x, weight=weight, bias=bias, eps=eps)
    return _activated(y, negative_slope)


def norm_by_sample(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """`instance_norm` of a dense channels-last tensor, as batch norm of one sample at a time.

    Group norm would be one call, but its channels-last backward is many times slower on a CPU.
    """
    if not torch.compiler.is_compiling() and has_torch_function((x,)):  # so that a mode sees one operation
        return handle_torch_function(norm_by_sample, (x,), x, weight, bias, eps)
    # Batch norm of one sample has the statistics of instance norm.
    is_differentiated = torch.is_grad_enabled() or torch.compiler.is_compiling()
    is_single_voxel = x.numel() == x.shape[0] * x.shape[1]  # batch_norm raises there, and should
    if is_differentiated or x.is_cuda or is_single_voxel:
        samples = [
            F.batch_norm(sample, None, None, weight, bias, training=True, momentum=0.0, eps=eps)
            for sample in x.split(1)
        ]
        return torch.cat(samples) if len(samples) > 1 else samples[0]
    return _norm_by_sample_without_copy(x, weight, bias, eps)


def _norm_by_sample_without_copy(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Each sample into its place in the output: no copy for `torch.cat`, but no gradient either."""
    statistics_dtype = next(tensor for tensor in (weight, bias, x) if tensor is not None).dtype
    mean, rstd = x.new_empty(2, x.shape[1], dtype=statistics_dtype)  # overwritten by each sample, not used
    y = torch.empty_like(x)
    for source, target in zip(x.split(1), y.split(1), strict=True):
        torch.native_batch_norm(
            source,
            weight,
            bias,
            None,  # running mean
            None,  # running variance
            True,  # training: by the statistics of this sample
            0.0,  # momentum
            eps,
            out=(target, mean, rstd),
        )
    return y


def triton_instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    negative_slope: float | None,
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
        is_batched = input.ndim == layer._get_no_batch_dim() + 1
        is_valid = is_batched and input.shape[1] == layer.num_features
        if not is_valid or layer.track_running_stats:
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

    Args:
        fuse: move a ReLU or leaky ReLU that follows such a norm into it and replace it by `nn.Identity`;
            only in subclasses of `nn.Sequential`, because others may iterate over a plain one, and only if
            neither layer is used elsewhere or has hooks.
    """
    swapped = 0
    for layer in network.modules():
        norm: Any = layer
        if type(norm) in _SWAPS and _is_untouched(norm) and not norm.track_running_stats:
            norm.__class__ = _SWAPS[type(norm)]
            swapped += 1
    if fuse:
        registrations: Counter[int] = Counter()
        for parent in network.modules():
            registrations.update(id(child) for child in parent._modules.values())
        for parent in network.modules():
            if isinstance(parent, nn.Sequential) and _is_block(parent):
                _fuse(parent, registrations)
    return swapped


def _fuse(parent: nn.Sequential, registrations: Counter[int]) -> None:
    """Move activations into the norms before them. `registrations`: uses of each module, by its id."""
    for (_, norm), (name, activation) in pairwise(list(parent._modules.items())):
        if not isinstance(norm, _ChannelsLast) or norm.negative_slope is not None:
            continue
        if type(activation) not in (nn.LeakyReLU, nn.ReLU):
            continue
        is_used_once = registrations[id(norm)] == 1 and registrations[id(activation)] == 1
        if is_used_once and _is_bare(norm) and _is_bare(activation):
            slope = float(getattr(activation, "negative_slope", 0.0))
            norm.negative_slope = slope
            # in its place, so that the names of the layers after it stay
            parent._modules[name] = nn.Identity().train(activation.training)


def _is_block(parent: nn.Sequential) -> bool:
    """Whether a subclass of `nn.Sequential` does nothing but run its layers one after another."""
    parent_class = type(parent)
    if parent_class is nn.Sequential or not _is_untouched(parent):
        return False
    has_own_forward = parent_class.forward is not nn.Sequential.forward
    has_own_iterator = parent_class.__iter__ is not nn.Sequential.__iter__
    return not has_own_forward and not has_own_iterator


def _is_untouched(layer: nn.Module) -> bool:
    """No forward was put on the object itself."""
    return "forward" not in vars(layer)


def _is_bare(layer: Any) -> bool:
    """Untouched, and nothing watches it."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    has_hooks = any(getattr(layer, attribute, None) for attribute in hooks)
    return _is_untouched(layer) and not has_hooks


def _activated(x: Tensor, negative_slope: float | None) -> Tensor:
    """A leaky ReLU, in place: x is no input of the caller."""
    if negative_slope is None:
        return x
    # torch cannot undo it in the backward pass for a slope below zero
    return F.leaky_relu(x, negative_slope, inplace=negative_slope >= 0)


# Custom operators, so that the compiler sees one operation and autograd the hand-written backward. Triton is
# imported where they run: it is not installed everywhere, and its import takes a second.


@torch.library.custom_op("medconv::instance_norm", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    negative_slope: float | None,
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
def _(
    x: Tensor,
    weight: Any,
    bias: Any,
    eps: float,
    negative_slope: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    statistics_dtype = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x, memory_format=CHANNELS_LAST[x.ndim])
    mean = x.new_empty(x.shape[:2], dtype=statistics_dtype)
    rstd = x.new_empty(x.shape[:2], dtype=statistics_dtype)
    return y, mean, rstd


@_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Any,
    bias: Any,
    negative_slope: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    num_channels = x.shape[1:2]
    x_grad = torch.empty_like(x, memory_format=CHANNELS_LAST[x.ndim])
    weight_grad = mean.new_empty(num_channels)
    bias_grad = mean.new_empty(num_channels)
    return x_grad, weight_grad, bias_grad


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, _, negative_slope = inputs
    _, mean, rstd = output
    ctx.negative_slope = negative_slope
    ctx.save_for_backward(x, mean, rstd, weight, bias)


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, mean, rstd, weight, bias = ctx.saved_tensors
    x_grad, weight_grad, bias_grad = _backward(grad, x, mean, rstd, weight, bias, ctx.negative_slope)
    return (
        x_grad,
        None if weight is None else weight_grad.to(weight.dtype),
        None if bias is None else bias_grad.to(bias.dtype),
        None,  # eps
        None,  # negative_slope
    )


_forward.register_autograd(_gradients, setup_context=_save)
