"""Backward passes of convolutions as people wrote them by hand: peers of `medconv.convs.autograd`, slow by
design.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medconv.convs import Convolution


class TwoCallConvolution(Convolution):
    """Through `torch.nn.grad`, as its documentation shows it: since torch 1.11 one library call for each
    gradient.
    """

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        axes = weight.ndim - 2
        for_input = {2: torch.nn.grad.conv2d_input, 3: torch.nn.grad.conv3d_input}[axes]
        for_weight = {2: torch.nn.grad.conv2d_weight, 3: torch.nn.grad.conv3d_weight}[axes]
        geometry = (tuple(stride), tuple(padding), tuple(dilation), groups)
        grad_x = for_input(x.shape, weight, grad, *geometry) if ctx.needs_input_grad[0] else None
        grad_weight = for_weight(x, weight.shape, grad, *geometry) if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum([0, *range(2, grad.ndim)]) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


class HistoricConvolution(Convolution):
    """What `torch.nn.grad.conv2d_weight` did until torch 1.10: the weight's gradient as a convolution of the
    input with the output's gradient, every pair of batch and channel a group of its own, strides turned into
    dilations; 2D only.
    """

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        batch, into = x.shape[:2]
        out, _, height, width = weight.shape
        size = [(g - 1) * s - 2 * p + d * (k - 1) + 1 for g, s, p, d, k in zip(grad.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True)]  # fmt: skip
        extra = [n - m for n, m in zip(x.shape[2:], size, strict=True)]
        grad_x = F.conv_transpose2d(grad, weight, None, stride, padding, extra, groups, dilation)
        repeated = grad.repeat(1, into // groups, 1, 1)
        repeated = repeated.view(batch * out * (into // groups), 1, *grad.shape[2:])
        flat = x.reshape(1, batch * into, *x.shape[2:])
        grad_weight = F.conv2d(flat, repeated, None, dilation, padding, stride, batch * into)
        grad_weight = grad_weight.view(batch, grad_weight.shape[1] // batch, *grad_weight.shape[2:]).sum(0)
        grad_weight = grad_weight.view(into // groups, out, *grad_weight.shape[1:]).transpose(0, 1)
        return grad_x, grad_weight[:, :, :height, :width], None, None, None, None, None
