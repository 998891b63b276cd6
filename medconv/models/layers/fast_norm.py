"""Instance, group and batch norms that keep channels-last, optionally fused with a (leaky) ReLU.

`nn.InstanceNorm2d/3d`, and on a GPU `nn.GroupNorm`, return a contiguous tensor for a channels-last one
(pytorch#59168): every convolution around them then copies its input. `nn.BatchNorm3d` keeps the format, but
has no fast kernel for it on a GPU. Triton does the work there; elsewhere batch norm does, for instance norm
sample by sample.
"""

import os
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from medconv.convs.parametrization import CHANNELS_LAST
from medconv.models.layers.triton_norm import BatchStatistics, triton_norm
from medconv.utils.hardware import triton_missing

_MAX_SAMPLES = 65535  # the third axis of a launch
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"  # on CPU tensors, for tests
# The interpreter needs no compiler.
_HAS_TRITON = find_spec("triton") is not None if _INTERPRETS else triton_missing() is None


def is_channels_last(x: Tensor) -> bool:
    """Also a slice of a channels-last tensor; not where both formats are the same."""
    return x.ndim in CHANNELS_LAST and x.stride(1) == 1 and not x.is_contiguous()


def uses_triton(x: Tensor) -> bool:
    """Whether `triton_norm` can do it, and faster than torch: channels-last, on a GPU."""
    is_there = _HAS_TRITON and (x.is_cuda or _INTERPRETS)
    has_samples = 0 < len(x) <= _MAX_SAMPLES
    return is_there and has_samples and is_channels_last(x) and x.dtype in _DTYPES


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
    if uses_triton(x):
        return triton_norm(x, weight, bias, eps, negative_slope)
    if len(x) == 0:  # torch fails on weights here
        y = F.instance_norm(x, eps=eps)
    elif is_channels_last(x):
        dense = x.contiguous(memory_format=CHANNELS_LAST[x.ndim])
        y = norm_by_sample(dense, weight, bias, eps)
    else:
        y = F.instance_norm(x, weight=weight, bias=bias, eps=eps)
    if negative_slope is None:
        return y
    # torch cannot undo it in the backward pass for a slope below zero
    return F.leaky_relu(y, negative_slope, inplace=negative_slope >= 0)


def norm_by_sample(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
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


def _norm_by_sample_without_copy(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
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


class ChannelsLastNorm(nn.Module):
    """Mixed into a norm of torch: its kernels for channels-last, and a leaky ReLU after it.

    Torch's own forward serves input without a batch, raises the errors, and does what no fast kernel does.

    Args:
        negative_slope: of the leaky ReLU; 0 is a ReLU, None no activation.
    """

    negative_slope: float | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self._is_usual(input):
            return self._fast_forward(input)
        y: Tensor = super().forward(input)
        if self.negative_slope is None:
            return y
        # in place: y is no input of the caller; torch cannot undo a slope below zero in the backward pass
        return F.leaky_relu(y, self.negative_slope, inplace=self.negative_slope >= 0)

    def _is_usual(self, input: Tensor) -> bool:
        """Whether `_fast_forward` can do it."""
        raise NotImplementedError

    def _fast_forward(self, input: Tensor) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        activation = "" if self.negative_slope is None else f", negative_slope={self.negative_slope}"
        return super().extra_repr() + activation


class _InstanceNorm(ChannelsLastNorm):
    def _is_usual(self, input: Tensor) -> bool:
        layer: Any = self
        is_batched = input.ndim == layer._get_no_batch_dim() + 1
        is_valid = is_batched and input.shape[1] == layer.num_features
        return is_valid and not layer.track_running_stats

    def _fast_forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        return instance_norm(input, layer.weight, layer.bias, layer.eps, self.negative_slope)


class ChannelsLastInstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`nn.InstanceNorm2d` that keeps channels-last; with a leaky ReLU if `negative_slope` is set."""


class ChannelsLastInstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`nn.InstanceNorm3d` that keeps channels-last; with a leaky ReLU if `negative_slope` is set."""


class ChannelsLastGroupNorm(ChannelsLastNorm, nn.GroupNorm):
    """`nn.GroupNorm` that keeps channels-last on a GPU; with a leaky ReLU if `negative_slope` is set."""

    def _is_usual(self, input: Tensor) -> bool:
        return uses_triton(input) and input.shape[1] == self.num_channels

    def _fast_forward(self, input: Tensor) -> Tensor:
        return triton_norm(
            input, self.weight, self.bias, self.eps, self.negative_slope, groups=self.num_groups
        )


class _BatchNorm(ChannelsLastNorm):
    spatial_dims: int

    def _is_usual(self, input: Tensor) -> bool:
        layer: Any = self
        is_valid = input.ndim == self.spatial_dims + 2 and input.shape[1] == layer.num_features
        # momentum None is a mean over all batches: its share waits for the count on the GPU
        is_usual = is_valid and uses_triton(input) and layer.momentum is not None
        return is_usual and input.numel() > input.shape[1]  # torch raises for a single value per channel

    def _fast_forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        is_training = layer.training or layer.running_mean is None
        batch = BatchStatistics()
        # where tracking was switched off later, the running statistics stay, and serve evaluation
        if layer.track_running_stats or not is_training:
            batch = BatchStatistics(layer.running_mean, layer.running_var, layer.momentum, is_training)
            if is_training and layer.num_batches_tracked is not None:
                layer.num_batches_tracked.add_(1)
        return triton_norm(input, layer.weight, layer.bias, layer.eps, self.negative_slope, batch)


class ChannelsLastBatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d`, fast for channels-last on a GPU; with a leaky ReLU if `negative_slope` is set."""

    spatial_dims = 2


class ChannelsLastBatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d`, fast for channels-last on a GPU; with a leaky ReLU if `negative_slope` is set."""

    spatial_dims = 3


_SWAPS: dict[type, type] = {
    nn.BatchNorm2d: ChannelsLastBatchNorm2d,
    nn.BatchNorm3d: ChannelsLastBatchNorm3d,
    nn.GroupNorm: ChannelsLastGroupNorm,
    nn.InstanceNorm2d: ChannelsLastInstanceNorm2d,
    nn.InstanceNorm3d: ChannelsLastInstanceNorm3d,
}
SWAPPED = tuple(_SWAPS)
_BATCH_NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_INSTANCE_NORMS = (nn.InstanceNorm2d, nn.InstanceNorm3d)


def swap_norms(network: nn.Module, keep_batch_norms: bool = False) -> int:
    """Make every instance, group and batch norm keep channels-last, in place; returns their number.

    Parameters, buffers, state dict and training flags stay. Instance norms with running statistics and norms
    with a forward of their own are not changed.

    A ReLU or leaky ReLU that follows such a norm moves into it, with `nn.Identity` in its place; only in
    subclasses of `nn.Sequential`, because others may iterate over a plain one, and only if neither layer is
    used elsewhere or has hooks.

    Args:
        keep_batch_norms: leave those to torch, which replaces them by `nn.SyncBatchNorm`: that would lose
            their activation.
    """
    swapped = 0
    for layer in network.modules():
        norm: Any = layer
        # Not where a forward was put on the object itself.
        if type(norm) not in _SWAPS or "forward" in vars(norm):
            continue
        has_running_statistics = isinstance(norm, _INSTANCE_NORMS) and norm.track_running_stats
        if has_running_statistics or (keep_batch_norms and isinstance(norm, _BATCH_NORMS)):
            continue
        norm.__class__ = _SWAPS[type(norm)]
        swapped += 1
    registrations: Counter[int] = Counter()
    for parent in network.modules():
        registrations.update(id(child) for child in parent._modules.values())
    for parent in network.modules():
        kind: Any = type(parent)
        # A subclass that does nothing but run its layers one after another.
        if not isinstance(parent, nn.Sequential) or kind is nn.Sequential or "forward" in vars(parent):
            continue
        if kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__:
            _fuse(parent, registrations)
    return swapped


def _fuse(parent: nn.Sequential, registrations: Counter[int]) -> None:
    """Move activations into the norms before them. `registrations`: uses of each module, by its id."""
    for (_, norm), (name, activation) in pairwise(list(parent._modules.items())):
        if not isinstance(norm, ChannelsLastNorm) or norm.negative_slope is not None:
            continue
        # not subclasses, which may compute something else
        if type(activation) not in (nn.LeakyReLU, nn.ReLU):
            continue
        # used once, no forward put on the object itself, and nothing that watches it
        if all(
            registrations[id(layer)] == 1
            and "forward" not in vars(layer)
            and not any(getattr(layer, hooks, None) for hooks in _HOOKS)
            for layer in (norm, activation)
        ):
            # a ReLU has no slope attribute: it is a leaky one of slope 0
            slope = float(getattr(activation, "negative_slope", 0.0))
            norm.negative_slope = slope
            # in its place, so that the names of the layers after it stay
            parent._modules[name] = nn.Identity().train(activation.training)
