"""Which convolutions `shard_convs` divides, and which way: all checks, before anything is changed."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

from medconv.convs.parametrization import CONVS, TRANSPOSED, has_own_forward

WAYS = ("out", "in", "pair")
_NORMS = (_BatchNorm, _InstanceNorm)
_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid)
# layers that treat each channel separately, so that sharded channels need not be gathered for them
_CHANNELWISE = (*_NORMS, *_ACTIVATIONS, nn.Identity)


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
