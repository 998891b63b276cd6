"""Times a convolution against `nn.Conv` at the sizes that a network has."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from medconv import config as configs
from medconv.config import ConfigError, Derived, RunConfig, compose
from medconv.convs.parametrization import UnsuitableLayerError
from medconv.features.diagnosis import conv_cost
from medconv.features.diagnosis.conv_cost import (
    Layer,
    NetworkSizes,
    computing_in,
    replaced_layers,
    switches_of,
)
from medconv.planning.topology import stem_for
from medconv.training.plan_setup import network_without_data
from medconv.utils.errors import ArgumentError
from medconv.utils.hardware import autocast_dtype, resolve_precision, uses_gpu

# Arguments of nn.ConvNd beside the sizes, and the values with which a class needs none.
_DEFAULTS = {"stride": 1, "dilation": 1, "groups": 1}
_ROW = "{:<42} {:>5} {:>8} {:>8} {:>11} {:>11} {:>9}"
_BUSY = 0.25  # share of a ratio beyond which its spread makes it no basis for a decision
_HEAD = ("layer", "times", "nn.Conv", "this", "ratio", "kept MB", "operators")

log = logging.getLogger(__name__)


def configs_with(
    conv: str, overrides: Sequence[str], packages: Sequence[str]
) -> list[tuple[list[str], RunConfig]]:
    """The configs of a convolution, each with its overrides; several for the overrides of a sweep.

    Args:
        conv: an option, or the dotted path of a class.
        overrides: for Hydra.
        packages: of the user's own, which are imported first.
    """
    composed = compose.compose(_with_keys(conv, overrides, packages))
    return [(list(each.settings.overrides.task), configs.validate(each.values)) for each in composed]


def _with_keys(conv: str, overrides: Sequence[str], packages: Sequence[str]) -> list[str]:
    """The overrides with convolution and packages before the first key."""
    keys = [f"conv={conv}"] if "." not in conv else ["conv=none", f"conv._target_={conv}"]
    if packages:
        keys.append(f"run.packages=[{','.join(packages)}]")
    first = compose.place_of_keys(overrides).start
    return [*overrides[:first], *keys, *overrides[first:]]


@dataclass(frozen=True)
class Sizes:
    """What the data would say.

    Args:
        inputs: channels of the image.
        outputs: classes.
        batch: patches.
    Raises:
        ArgumentError: a number is less than 1.
    """

    inputs: int
    outputs: int
    batch: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ArgumentError(name, f" must be at least 1, got {value}")


def measure(config: RunConfig, sizes: Sizes, pairs: int, compiles: bool = False) -> list[dict[str, Any]]:
    """A row for each distinct layer, most expensive first, then one for each remedy of the first layer.

    Args:
        pairs: rounds of timings.
        compiles: as in `conv_cost.remedies`.
    Raises:
        ArgumentError: `pairs` is less than 1.
        ConfigError: no patch size, or a convolution that the network cannot have.
    """
    if pairs < 1:
        raise ArgumentError("pairs", f" must be at least 1, got {pairs}")
    accelerator = config.trainer.accelerator
    precision = resolve_precision(config.trainer.precision or "auto", accelerator)
    device = torch.device("cuda" if uses_gpu(accelerator) else "cpu")
    layers = _layers(config, sizes, device)
    rows = []
    with computing_in(device, autocast_dtype(precision)):
        for number, layer in enumerate(layers, start=1):
            log.info("timing %s (%d of %d)", layer.case, number, len(layers))
            rows.append({**conv_cost.cost(layer, pairs), "precision": precision})
        excess = [row["count"] * (row["seconds"] - row["library_seconds"]) for row in rows]
        worst = excess.index(max(excess))
        rows[worst]["limit"] = conv_cost.limit(layers[worst], rows[worst]["ratio"], pairs)
        log.info("timing what helps %s", layers[worst].name)
        helped = conv_cost.remedies(layers[worst], pairs, compiles)
    by_excess = sorted(range(len(rows)), key=lambda index: excess[index], reverse=True)
    return [*(rows[index] for index in by_excess), *helped]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What `measure` returns, for the terminal."""
    costs = [row for row in rows if "count" in row]
    helped = [row for row in rows if "count" not in row]
    library = sum(row["count"] * row["library_seconds"] for row in costs)
    custom = sum(row["count"] * row["seconds"] for row in costs)
    name = costs[0]["case"].partition(",")[0]
    batch = costs[0]["case"].rpartition(", ")[2]  # the same for all
    limit = "unknown, its times vary too much" if _spreads(costs[0]) else costs[0]["limit"]
    lines = [
        f"forward and backward, milliseconds, {costs[0]['precision']}, {batch}",
        _ROW.format(*_HEAD).rstrip(),
        *map(_cost_line, costs),
        f"\nall layers together: {custom / library:.2f} times nn.Conv; {name} costs most",
        f"what limits {name}: {limit}",
        f"\nwhat helps {name}: time beside the layer as it is",
        *map(_remedy_line, helped),
    ]
    if any(map(_spreads, rows)):
        lines.append("\nspreads are large: the machine is busy, so repeat it with more pairs")
    return "\n".join(lines)


def _spreads(row: Mapping[str, Any]) -> bool:
    """Whether a ratio is no basis for a decision."""
    return bool(row["spread"] / 2 > _BUSY * row["ratio"])


def _cost_line(row: Mapping[str, Any]) -> str:
    kept = " / ".join(f"{size / 1e6:.1f}" for size in row["kept_bytes"])
    operators = " / ".join(map(str, row["operators"]))
    ratio = f"{row['ratio']:.2f} ±{row['spread'] / 2:.2f}"
    milliseconds = [f"{1e3 * row[key]:.2f}" for key in ("library_seconds", "seconds")]
    layer = row["case"].rpartition(", ")[0]
    return _ROW.format(layer, row["count"], *milliseconds, ratio, kept, operators)


def _remedy_line(row: Mapping[str, Any]) -> str:
    memory = ""
    if row["kept_bytes"] is not None:
        memory = (
            f", keeps {row['kept_bytes'] / 1e6:.1f} MB instead of {row['reference_kept_bytes'] / 1e6:.1f}"
        )
    return f"  {row['variant']:<30} {row['ratio']:.2f} ±{row['spread'] / 2:.2f}{memory}"


def _layers(config: RunConfig, sizes: Sizes, device: torch.device) -> list[Layer]:
    """Raises: ConfigError: the convolution replaces none."""
    derived = _derived(config, sizes)
    resolved = configs.with_derived(config, derived)
    model = resolved.model
    timed = NetworkSizes(model, derived, sizes.batch, device, switches_of(resolved.perf))
    layers = list(replaced_layers(timed, resolved.conv, _build, is_checked=False))
    if not layers:
        raise ConfigError(f"conv={resolved.conv['_target_']} leaves every layer an nn.Conv: nothing to time")
    return layers


def _derived(config: RunConfig, sizes: Sizes) -> Derived:
    """What a plan would say for this patch size. Raises: ConfigError: none, or one that does not fit."""
    patch = config.data.patch_size
    if patch is None:
        raise ConfigError("data.patch_size is needed, such as data.patch_size=[64,64,64], got null")
    dims = len(patch)
    if config.data.spatial_dims not in (None, dims):
        raise ConfigError(
            f"data.patch_size={list(patch)} has {dims} axes, but data.spatial_dims={config.data.spatial_dims}"
        )
    spacing = list(config.data.spacing_mm or [1.0] * dims)
    network = network_without_data(config, patch, spacing)
    return Derived(
        num_channels=sizes.inputs,
        num_classes=sizes.outputs,
        targets={},
        per_voxel=True,
        class_counts=None,
        overlapping=False,
        exclusive=True,
        class_names=[f"class {index}" for index in range(sizes.outputs)],
        flip_label_pairs=None,
        train_cases="none",
        spatial_dims=dims,
        slice_axis=None,
        spacing_mm=spacing,
        patch_size=list(patch),
        strides=[list(step) for step in network.strides],
        kernel_sizes=[list(kernel) for kernel in network.kernel_sizes],
        channels=list(network.channels),
        normalisation=["zscore"] * sizes.inputs,
        memory_gb=0.0,
        size=config.plan.size or "full",
        stage_strides=[[1] * dims, *(list(step) for step in network.strides)],
        monitor="val/dice",
        monitor_mode="max",
        num_train_cases=1,
        stem=stem_for(list(patch)),
    )


def _build(node: Mapping[str, Any], key: str) -> Any:
    """As `config.build`; a convolution may also be a class with the arguments of `nn.ConvNd`."""
    built = configs.build(node, key)
    if key == "conv" and isinstance(built, partial) and _takes_sizes(built.func):
        return partial(_of_the_sizes_of, conv_class=built)
    return built


def _takes_sizes(function: Callable[..., Any]) -> bool:
    return isinstance(function, type) and "in_channels" in signature(function).parameters


def _of_the_sizes_of(conv: Any, conv_class: partial[nn.Module]) -> nn.Module:
    """Raises: UnsuitableLayerError: the class has no argument for, say, the stride of this layer."""
    taken = signature(conv_class.func).parameters
    arguments: dict[str, Any] = {"bias": conv.bias is not None} if "bias" in taken else {}
    for name in ("kernel_size", "stride", "padding", "dilation", "groups"):
        value = _one_number(getattr(conv, name))
        if name in taken:
            arguments[name] = value
        elif name in _DEFAULTS and value != _DEFAULTS[name]:
            reason = f"{name} {value}"
            raise UnsuitableLayerError(f"{conv_class.func.__name__} takes no {name}, got {value}", reason)
    return conv_class(conv.in_channels, conv.out_channels, **arguments)


def _one_number(value: Any) -> Any:
    """The number that a sequence repeats, which is all that a simple class takes."""
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value
