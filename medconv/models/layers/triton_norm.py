"""Channels-last instance, group and batch norm by kernels of `triton_norm_launch`, with their own backward.

Eager training calls them through a plain `autograd.Function`, whose Python costs the host less than that of
an operator. While compiling they are operators of torch, so that the compiler sees one operation. Triton is
imported where they run: it is not installed everywhere, and its import takes a second.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from medconv.convs.parametrization import CHANNELS_LAST


@dataclass(frozen=True)
class BatchStatistics:
    """Statistics of a batch norm.

    Args:
        running_mean, running_var: (C,); None: not tracked.
        momentum: the share of this batch in the new running statistics.
        training: use the statistics of this batch and update the running ones, else use the running ones.
    """

    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    momentum: float = 0.0
    training: bool = True

    def without_update(self) -> "BatchStatistics":
        """Those of the same output."""
        return BatchStatistics() if self.training else self

    def update(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Args: mean, variance: of a batch, (1, C), biased. count: values of each channel."""
        if self.running_mean is None or self.running_var is None:
            return
        unbiased = variance[0] * (count / (count - 1))
        running = [self.running_mean, self.running_var]
        batch = [mean[0].to(self.running_mean.dtype), unbiased.to(self.running_var.dtype)]
        torch._foreach_lerp_(running, batch, self.momentum)


def triton_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    negative_slope: float | None,
    batch: BatchStatistics | None = None,
    groups: int = 0,
) -> Tensor:
    """Normalise, scale, shift and activate; the output is always channels-last. Differentiable once.

    Saves x and its statistics for the backward, not the output. CPU tensors only under TRITON_INTERPRET=1.

    Shape:
        x (N, C, *spatial), weight and bias (C,) -> (N, C, *spatial), dtype of x.
    Args:
        eps: added to the variance.
        negative_slope: of a leaky ReLU; 0 is a ReLU, None no activation.
        batch: of a batch norm; None: instance or group norm.
        groups: of channels, of a group norm.
    """
    if not torch.compiler.is_compiling() and has_torch_function((x,)):  # so that a mode sees one operation
        arguments = (x, weight, bias, eps, negative_slope)
        return handle_torch_function(triton_norm, (x,), *arguments, batch=batch, groups=groups)
    running: tuple[Tensor | None, Tensor | None] = (None, None)
    if batch is not None and not batch.training:
        running = (batch.running_mean, batch.running_var)
    over_batch = batch is not None
    norm = _operator if torch.compiler.is_compiling() else _Norm.apply
    result: tuple[Tensor, Tensor, Tensor]
    result = norm(x, weight, bias, *running, eps, negative_slope, over_batch, groups)
    y, mean, variance = result
    if batch is not None and batch.training:
        batch.update(mean.detach(), variance.detach(), x.numel() // x.shape[1])
    return y


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    negative_slope: float | None,
    over_batch: bool,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Also mean and biased variance of x; empty where the running ones are given."""
    from medconv.models.layers import triton_norm_launch

    if running_mean is None or running_var is None:
        return triton_norm_launch.forward(x, weight, bias, None, eps, negative_slope, over_batch, groups)
    running = (running_mean, running_var)
    y = triton_norm_launch.forward(x, weight, bias, running, eps, negative_slope, over_batch)[0]
    # neither an operator nor a function of autograd may return its inputs
    return y, running_mean.new_empty(0), running_mean.new_empty(0)


def _backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    negative_slope: float | None,
    over_batch: bool,
    groups: int,
    are_given: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from medconv.models.layers import triton_norm_launch

    return triton_norm_launch.backward(
        grad, x, mean, variance, weight, bias, eps, negative_slope, over_batch, groups, are_given
    )


_operator = torch.library.custom_op("medconv::norm", _forward, mutates_args=())
_backward_operator = torch.library.custom_op("medconv::norm_backward", _backward, mutates_args=())


@_operator.register_fake
def _(
    x: Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    eps: float,
    negative_slope: Any,
    over_batch: bool,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=CHANNELS_LAST[x.ndim])
    if running_mean is not None:
        return y, running_mean.new_empty(0), running_mean.new_empty(0)
    dtype = torch.promote_types(x.dtype, torch.float32)
    shape = (1 if over_batch else x.shape[0], x.shape[1])
    return y, x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype)


@_backward_operator.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Any,
    bias: Any,
    eps: float,
    negative_slope: Any,
    over_batch: bool,
    groups: int,
    are_given: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    x_grad = torch.empty_like(x, memory_format=CHANNELS_LAST[x.ndim])
    weight_grad = x.new_empty(x.shape[1], dtype=dtype)
    bias_grad = x.new_empty(x.shape[1], dtype=dtype)
    return x_grad, weight_grad, bias_grad


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, running_mean, running_var, *ctx.constants = inputs
    ctx.are_given = running_mean is not None
    statistics = (running_mean, running_var) if ctx.are_given else output[1:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, *statistics, weight, bias)


def _gradients(backward: Any, ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, mean, variance, weight, bias = ctx.saved_tensors
    x_grad, weight_grad, bias_grad = backward(
        grad, x, mean, variance, weight, bias, *ctx.constants, ctx.are_given
    )
    return (
        x_grad,
        None if weight is None else weight_grad.to(weight.dtype),
        None if bias is None else bias_grad.to(bias.dtype),
        *[None] * 6,
    )


_operator.register_autograd(partial(_gradients, _backward_operator), setup_context=_save)


class _Norm(torch.autograd.Function):
    forward = staticmethod(_forward)
    setup_context = staticmethod(_save)
    backward = staticmethod(once_differentiable(partial(_gradients, _backward)))  # type: ignore[assignment]
