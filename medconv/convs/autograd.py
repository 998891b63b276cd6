"""A base for convolutions with a hand-written backward: one library call for the gradients needed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Convolution(torch.autograd.Function):
    """A convolution whose backward is written by hand; override `backward` and call `gradients` in it.

    Differentiable twice, compiles as one graph. Writing a backward with `torch.nn.grad.conv2d_input` and
    `conv2d_weight` instead needs one library call per gradient (docs/benchmarks.md).
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Tensor:
        return torch.convolution(
            x,
            weight,
            bias,
            stride,
            padding,
            dilation,
            False,  # transposed
            [0] * len(stride),  # output_padding, of transposed ones only
            groups,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, *geometry = inputs
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry  # stride, padding, dilation, groups
        ctx.bias_size = None if bias is None else [bias.shape[0]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        geometry_gradients = (None, None, None, None)
        return (*gradients(ctx, grad), *geometry_gradients)


def gradients(ctx: Any, grad: Tensor) -> Gradients:
    """Gradients of input, weight and bias, each if needed, from one `aten::convolution_backward`."""
    x, weight = ctx.saved_tensors
    stride, padding, dilation, groups = ctx.geometry
    x_needs, weight_needs, bias_needs = ctx.needs_input_grad[:3]
    results: Gradients = torch.ops.aten.convolution_backward(
        grad,
        x,
        weight,
        ctx.bias_size,
        stride,
        padding,
        dilation,
        False,  # transposed
        [0] * len(stride),  # output_padding
        groups,
        [x_needs, weight_needs, bias_needs and ctx.bias_size is not None],
    )
    return results


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    function: type[Convolution] = Convolution,
) -> Tensor:
    """Like `F.conv1d`, `conv2d` and `conv3d`, with a hand-written backward; autocast casts its inputs, too.

    Shape:
        x (batch, in, *spatial), weight (out, in / groups, *kernel_size), bias (out,)
        -> (batch, out, *spatial').
    Args:
        stride: in voxels; one number, or one per spatial axis.
        padding: zeros on both sides, in voxels; one number, or one per spatial axis.
        dilation: distance of neighbouring taps, in voxels; one number, or one per spatial axis.
        groups: blocks of channels that do not mix.
        function: your own subclass of `Convolution`.
    Raises:
        ValueError: x and the weight differ in their axes, or an argument has not one number per axis.
    """
    if x.ndim != weight.ndim or x.ndim < 3:
        raise ValueError(
            f"x and weight must have equally many axes, 3 or more, got {x.ndim} and {weight.ndim}"
        )
    spatial_dims = weight.ndim - 2
    stride = _per_axis("stride", stride, spatial_dims)
    padding = _per_axis("padding", padding, spatial_dims)
    dilation = _per_axis("dilation", dilation, spatial_dims)
    # Autocast does not look into a custom function, so it is done here as for torch's convolutions.
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    output: Tensor = function.apply(x, weight, bias, stride, padding, dilation, groups)
    return output


def _per_axis(name: str, value: int | Sequence[int], spatial_dims: int) -> list[int]:
    values = [value] * spatial_dims if isinstance(value, int) else list(value)
    if len(values) != spatial_dims:
        raise ValueError(f"{name} must be one number or {spatial_dims}, one per spatial axis, got {value}")
    return values
