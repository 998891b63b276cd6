"""Tensor parallelism: convolution weights are sharded over processes by output or input channels.

Uses only `torch.distributed` and DTensor. All processes see the same batch; they exchange activations, not
weight gradients. When it pays and what it costs: docs/performance.md.

Source: Shoeybi et al. 2019, arXiv:1909.08053, for the pair of layers with one all-reduce; there for matrices.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

from medconv.convs.parametrization import CONVS, TRANSPOSED, has_own_forward
from medconv.models.mixin import mixed

_TensorFunction = Callable[[Tensor], Tensor]
_OUT_AXIS = 0  # of a weight (out, in, *kernel_size)
_IN_AXIS = 1
WAYS = ("out", "in", "pair")
_NORMS = (_BatchNorm, _InstanceNorm)
_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid)
# layers that treat each channel separately, so that sharded channels need not be gathered for them
_CHANNELWISE = (*_NORMS, *_ACTIVATIONS, nn.Identity)


def shard_convs(network: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> dict[str, str]:
    """Shard the weights of convolutions, in place. Output and gradients equal those of the unsharded network.

    With N processes, an input of X bytes and an output of Y bytes, each process sends, forward and backward:

        out   each has some output channels, the output is gathered    (N-1)/N * Y    2 (N-1)/N * X
        in    each has some input channels, the outputs are summed     2 (N-1)/N * Y  (N-1)/N * X
        pair  an `nn.Sequential` of two convolutions, the first `out`, 2 (N-1)/N * Y  2 (N-1)/N * X
              the second `in`, and what is between them stays sharded  (of the second) (of the first)

    Parameters become DTensors, so `torch.distributed.checkpoint.state_dict` gathers and scatters them; their
    names stay. All other weights are copied from the first process. Create the optimizer afterwards, without
    `foreach` or `fused`, which refuse plain and sharded weights together. Give all processes the same batch
    and the same seed, and clip with `clip_grad_norm`.

    Args:
        mesh: one-dimensional; its processes share the layers.
        plan: regular expression (`re.search` in a module's name) to its way; the first match counts. For
            `pair` it names the `nn.Sequential` that holds both layers, not one of them.
    Returns:
        Module name to `out`, `in` or `pair`, for each sharded module.
    Raises:
        ValueError: a layer cannot be sharded (named, with the reason), or a pattern matches none; the
            network is unchanged.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, got {mesh.ndim}; one of several is mesh['name']")
    ways = ways_of(network, mesh, plan)  # raises before anything is changed
    for name, way in ways.items():
        _shard(network.get_submodule(name), way, mesh)
    # What is not sharded must be the same everywhere, whatever each process drew.
    for tensor in (*network.parameters(), *network.buffers()):
        if not isinstance(tensor, DTensor):
            distributed.broadcast(tensor.data, group_src=0, group=mesh.get_group())
    return ways


def clip_grad_norm(network: nn.Module, max_norm: float) -> Tensor:
    """`nn.utils.clip_grad_norm_` for plain and sharded gradients.

    Returns:
        The norm before clipping.
    """
    all_grads = [parameter.grad for parameter in network.parameters()]
    grads = [grad for grad in all_grads if grad is not None]
    if not grads:
        return torch.tensor(0.0)
    sharded = [grad for grad in grads if isinstance(grad, DTensor)]
    plain = [grad for grad in grads if not isinstance(grad, DTensor)]
    norms: list[Tensor] = []
    for group in (sharded, plain):  # torch computes the norm of one kind at a time
        if group:
            norm = nn.utils.get_total_norm(group)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch's own
    for grad in grads:
        local_grad = grad.to_local() if isinstance(grad, DTensor) else grad
        local_grad.mul_(factor)
    return total


class _Exchange(torch.autograd.Function):
    """A function between processes, with another one for the gradient."""

    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: _TensorFunction, gradient: _TensorFunction) -> Tensor:
        ctx.gradient = gradient
        return function(x)

    @staticmethod
    @once_differentiable  # an exchange has no second derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grad), None, None


# The four exchanges. Each is the adjoint of another: the sum's gradient is passed on, a copy's is summed, and
# gathering and splitting undo each other.


def _with_summed_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return _Exchange.apply(
        x,
        lambda x: x.view_as(x),  # autograd wants another tensor than the input
        lambda grad: _sum(grad, mesh),
    )


def _summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return _Exchange.apply(x, lambda x: _sum(x, mesh), lambda grad: grad)


def _gathered(x: Tensor, channels: int, mesh: DeviceMesh) -> Tensor:
    """All channels; the gradient is the process's own share, since all processes have the same."""
    return _Exchange.apply(x, lambda x: _gather(x, channels, mesh), lambda grad: _local_channels(grad, mesh))


def _split(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The process's share of the channels; the gradients of all shares are gathered."""
    channels = x.shape[1]
    return _Exchange.apply(x, lambda x: _local_channels(x, mesh), lambda grad: _gather(grad, channels, mesh))


class _Local:
    """Mixin: reading a DTensor attribute gives the local shard; `parameters()` still gives the DTensor."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        return value.to_local() if isinstance(value, DTensor) else value


class _Out(_Local):
    """Mixin for a convolution with some of the output channels."""

    mesh: DeviceMesh
    in_pair: bool  # the output stays sharded

    def forward(self: Any, x: Tensor) -> Tensor:
        x = _with_summed_gradient(x, self.mesh)
        y: Tensor = self._conv_forward(x, self.weight, self.bias)
        return y if self.in_pair else _gathered(y, self.out_channels, self.mesh)


class _In(_Local):
    """Mixin for a convolution with some of the input channels."""

    mesh: DeviceMesh
    in_pair: bool  # the input is sharded already

    def forward(self: Any, x: Tensor) -> Tensor:
        local = x if self.in_pair else _split(x, self.mesh)
        y = _summed(self._conv_forward(local, self.weight, None), self.mesh)
        bias: Tensor | None = self.bias
        if bias is None:
            return y
        # after the sum, so that it is added once and not by every process
        spatial_ones = [1] * (y.dim() - 2)
        return y + bias.view(-1, *spatial_ones).to(y.dtype)


def _shard(module: Any, way: str, mesh: DeviceMesh) -> None:
    if way != "pair":
        _shard_conv(module, way, mesh)
        return
    first, norms, second = pair_of(module)
    _shard_conv(first, "out", mesh, in_pair=True)
    for norm in norms:
        _shard_norm(norm, mesh)
    _shard_conv(second, "in", mesh, in_pair=True)


def _shard_conv(layer: Any, way: str, mesh: DeviceMesh, in_pair: bool = False) -> None:
    axis = _OUT_AXIS if way == "out" else _IN_AXIS
    layer._parameters["weight"] = _sharded(layer.weight, axis, mesh)
    if way == "out" and layer.bias is not None:
        layer._parameters["bias"] = _sharded(layer.bias, 0, mesh)
    layer.mesh = mesh
    layer.in_pair = in_pair
    layer.__class__ = mixed(_Out if way == "out" else _In, layer)


def _shard_norm(norm: Any, mesh: DeviceMesh) -> None:
    """Keep scale, shift and statistics of this process's channels."""
    for tensors in (norm._parameters, norm._buffers):
        for key in ("weight", "bias", "running_mean", "running_var"):
            if tensors.get(key) is not None:
                tensors[key] = _sharded(tensors[key], 0, mesh)
    channels = torch.empty(1, norm.num_features)
    norm.num_features = _local_channels(channels, mesh).shape[1]
    norm.__class__ = mixed(_Local, norm)


def _sharded(tensor: Tensor, axis: int, mesh: DeviceMesh) -> Tensor:
    """The first process's tensor, sharded; the last shard may be smaller."""
    values = tensor.detach().contiguous()
    shards = distribute_tensor(values, mesh, [Shard(axis)])
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(shards, tensor.requires_grad)
    return shards


def _local_channels(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The channels of this process; DTensor shards alike."""
    return x.chunk(mesh.size(), 1)[mesh.get_local_rank()]


def _sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    total = x.contiguous().clone()
    distributed.all_reduce(total, group=mesh.get_group())
    return total


def _gather(x: Tensor, channels: int, mesh: DeviceMesh) -> Tensor:
    """Collectives need equal sizes, so the last share is padded with zeros, which are removed afterwards."""
    batch, local_channels, *spatial = x.shape
    padded: Tensor = x.new_zeros((batch, largest_share(channels, mesh), *spatial))
    padded[:, :local_channels] = x
    shares = padded.new_empty((mesh.size() * batch, *padded.shape[1:]))
    distributed.all_gather_into_tensor(shares, padded, group=mesh.get_group())
    # (processes * batch, share, ...) -> (batch, processes * share, ...)
    by_process: Tensor = shares.unflatten(0, (mesh.size(), batch))
    all_channels = by_process.transpose(0, 1).flatten(1, 2)
    return all_channels[:, :channels]


# Which convolutions a plan divides, and which way: all checks, before anything is changed


def ways_of(network: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> dict[str, str]:
    """Module name to its way, for each module that a pattern of the plan matches.

    Raises:
        ValueError: as `shard_convs`.
    """
    for key, way in plan.items():
        if way not in WAYS:
            raise ValueError(f"plan: {key!r} must be one of {WAYS}, got {way!r}")
    parameters = network.named_parameters(remove_duplicate=False)
    users = Counter(id(parameter) for _, parameter in parameters)
    ways: dict[str, str] = {}
    unmatched = set(plan)
    sharded_ids: set[int] = set()
    for name, module in network.named_modules():
        pattern = _first_match(name, module, plan)
        if pattern is None:
            continue
        unmatched.discard(pattern)
        try:
            if any(users[id(parameter)] > 1 for parameter in module.parameters()):
                raise ValueError("another layer has the same weights")
            _check_layers(module, plan[pattern], mesh, sharded_ids)
        except ValueError as error:
            raise ValueError(f"layer {name}: {error}" if name else str(error)) from error
        ways[name] = plan[pattern]
    if unmatched:
        first = min(unmatched)
        hint = "; pair is for the nn.Sequential that holds both convolutions" if plan[first] == "pair" else ""
        raise ValueError(
            f"plan: {first!r} matches no layer for {plan[first]!r} of {type(network).__name__}{hint}"
        )
    return ways


def _first_match(name: str, module: nn.Module, plan: Mapping[str, str]) -> str | None:
    """The first pattern that matches a module's name and whose way is for such modules."""
    for pattern, way in plan.items():
        kinds = nn.Sequential if way == "pair" else CONVS + TRANSPOSED
        if re.search(pattern, name) and isinstance(module, kinds):
            return pattern
    return None


def pair_of(block: nn.Sequential) -> tuple[Any, list[Any], Any]:
    """First convolution, the norms between, second convolution.

    Raises:
        ValueError: the block differs.
    """
    layers = list(block)
    conv_indices = [i for i, layer in enumerate(layers) if isinstance(layer, CONVS + TRANSPOSED)]
    if len(conv_indices) != 2:
        raise ValueError(f"a pair has two convolutions, this one has {len(conv_indices)}")
    first, second = conv_indices
    between = layers[first + 1 : second]
    for layer in between:
        if isinstance(layer, nn.SyncBatchNorm) or not isinstance(layer, _CHANNELWISE):
            raise ValueError(
                f"{type(layer).__name__} within a pair may mix channels, and each process has a share of them"
            )
    norms = [layer for layer in between if isinstance(layer, _NORMS)]
    return layers[first], norms, layers[second]


def _check_layers(module: Any, way: str, mesh: DeviceMesh, sharded_ids: set[int]) -> None:
    """Check a module's convolutions, and add them to `sharded_ids`.

    Raises:
        ValueError: one cannot be sharded.
    """
    layers = [(module, way)]
    if way == "pair":
        first, _, second = pair_of(module)
        layers = [(first, "out"), (second, "in")]
    for layer, layer_way in layers:
        if id(layer) in sharded_ids:
            raise ValueError("it is divided already")
        _check_shares(layer, layer_way, mesh)
        sharded_ids.add(id(layer))


def _check_shares(layer: Any, way: str, mesh: DeviceMesh) -> None:
    """Check that every process gets some channels, and that the layer computes nothing but a convolution.

    Raises:
        ValueError: the layer cannot be sharded this way.
    """
    if isinstance(layer, TRANSPOSED):
        raise ValueError("only plain convolutions with groups=1 can be divided, this is a transposed one")
    if layer.groups != 1:
        raise ValueError(
            f"only plain convolutions with groups=1 can be divided, this is groups={layer.groups}"
        )
    if any(isinstance(parameter, DTensor) for parameter in layer.parameters()):
        raise ValueError("it is divided already")
    if is_parametrized(layer):
        raise ValueError("its weight is computed from others; fold_convs makes a plain convolution of it")
    if has_own_forward(layer):
        raise ValueError(f"{type(layer).__name__} has a forward of its own, which would be lost")
    channels = layer.out_channels if way == "out" else layer.in_channels
    processes = mesh.size()
    if largest_share(channels, mesh) * (processes - 1) >= channels:
        raise ValueError(
            f"{channels} {way}put channels cannot be divided over {processes} processes, some would get none"
        )


def largest_share(channels: int, mesh: DeviceMesh) -> int:
    """Channels of each process but the last, which may have fewer: rounded up, as `chunk` and DTensor do."""
    return -(-channels // mesh.size())
