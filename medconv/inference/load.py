"""A checkpoint read back: the network, folded, and what its input must look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medconv import config as configs
from medconv.config import ConfigError, Values
from medconv.config import trusted as config_trusted
from medconv.convs import fold_convs
from medconv.convs import mirror_axes as mirror_axes_of
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.inference.sliding_window import SlidingWindow
from medconv.inference.tta import test_time_axes, training_axes
from medconv.models.build import build_network
from medconv.performance import switches
from medconv.performance.switches import apply_switches
from medconv.targets.image_level import ImageLevelTargets, image_targets_of
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils import checkpoint_io

_TASKS = ("Segmentation", "Classification", "Regression")
# What a record that somebody made up brings about in whatever is built from it.
DAMAGED = (LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, AssertionError, MemoryError)


@dataclass(frozen=True)
class LoadedModel:
    """A network as a checkpoint holds it, folded, in evaluation mode, with what its input must look like.

    Args:
        spacing_range_mm: smallest and largest spacing of the training cases along each axis (right, anterior,
            superior); empty where a checkpoint does not say.
        path: the checkpoint, or the exported file.
        seen_axes: along which the network saw mirrored images.
        equivariant_axes: along which it gives them mirrored logits by construction.
        card: beside an exported file, what says all of this.
        outcome: what it is asked of whole images; None: label maps. There are no targets then, all images
            have the size `window.patch_size`, and over flips along `window.mirror_axes` what the outputs mean
            is averaged.
        rounding: of pictures that all had one size, what it was rounded up to a multiple of; empty: of any
            size.
    """

    network: nn.Module
    recipe: PreprocessingConfig
    window: SlidingWindow
    class_names: tuple[str, ...]
    targets: SegmentationTargets
    modalities: tuple[str, ...]
    precision: str
    memory_format: torch.memory_format
    spacing_range_mm: tuple[tuple[float, float], ...] = ()
    path: Path | None = None
    seen_axes: tuple[int, ...] = ()
    equivariant_axes: tuple[int, ...] = ()
    card: Path | None = None
    image_targets: ImageLevelTargets | None = None
    rounding: tuple[int, ...] = ()


def load(
    path: Path,
    trusted: Sequence[str] = (),
    device: str = "cpu",
    mirror_axes: Sequence[int] | None = None,
    plain: bool = False,
) -> LoadedModel:
    """Read a checkpoint back: its network, priors folded, and its preprocessing.

    Args:
        trusted: packages of your own that its network may come from.
        mirror_axes: of test-time augmentation, in the place of those that it was validated with; spatial
            axes.
        plain: without the fast layers and layouts of `perf`, which are this package's own, so that it can be
            exported.
    Raises: ValueError: missing, damaged, not medconv's, of another task, naming a class that is not allowed,
        or axes along which the network never saw a mirrored image.
    """
    content = checkpoint_io.read(path)
    try:
        model = _built(content, path, trusted, mirror_axes, plain)
    except DAMAGED as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path}: damaged, or of another version: its record cannot be read ({reason})"
        ) from error
    model.network.to(device)
    return model


def _built(
    content: dict[str, Any],
    path: Path,
    trusted: Sequence[str],
    mirror_axes: Sequence[int] | None,
    plain: bool,
) -> LoadedModel:
    record, values = content["medconv"], content["medconv"]["config"]
    task = str(values["task"]["_target_"])
    if not task.endswith(_TASKS):
        raise ValueError(
            f"{path}: its task is {task}, expected one of medconv.training.tasks: {', '.join(_TASKS)}"
        )
    network = build_network(
        values, values["derived"]["patch_size"], partial(config_trusted.build_trusted, trusted=trusted)
    )
    checkpoint_io.load_weights(network, content, path)
    axes, equivariant = _mirror_axes(values, network, mirror_axes), mirror_axes_of(network)
    network = fold_convs(network).eval()
    channels_last, dims = values["perf"]["channels_last"] and not plain, values["derived"]["spatial_dims"]
    fast: dict[str, Any] = {key: values["perf"][key] and not plain for key in ("fast_norm", "fast_depthwise")}
    apply_switches(network, channels_last=channels_last, **fast)
    return LoadedModel(
        network,
        PreprocessingConfig(
            **{key: configs.lists_to_tuples(value) for key, value in record["preprocessing"].items()}
        ),
        _window(values, axes),
        tuple(record["class_names"]),
        _targets(record),
        tuple(record["modalities"]),
        str(values["trainer"]["precision"]),
        switches.memory_format(channels_last, dims),
        tuple((float(low), float(high)) for low, high in record["spacing_range_mm"]),
        path,
        training_axes(values),
        equivariant,
        image_targets=image_targets_of(values["derived"]),
        rounding=_rounding(values),
    )


def with_window(
    model: LoadedModel, overlap: float | None = None, batch_size: int | None = None
) -> LoadedModel:
    """The same network with other windows; None keeps what it was validated with. Raises: ValueError: not
    possible.
    """
    window = model.window
    window = window if overlap is None else replace(window, overlap=overlap)
    window = window if batch_size is None else replace(window, batch_size=batch_size)
    return replace(model, window=window)


def _mirror_axes(values: Values, network: nn.Module, wanted: Sequence[int] | None) -> tuple[int, ...]:
    if wanted is None:
        return test_time_axes(values, network)
    try:
        return test_time_axes({**values, "task": {**values["task"], "mirror_axes": list(wanted)}}, network)
    except ValueError as error:
        raise ConfigError(str(error).replace("task.mirror_axes", "--mirror-axes")) from error


def _window(values: Values, axes: tuple[int, ...]) -> SlidingWindow:
    task, known = values["task"], values["derived"]
    return SlidingWindow(
        tuple(known["patch_size"]),
        task.get("overlap", 0.5),  # these two are none of whole images'
        task.get("sw_batch_size", 4),
        axes,
        known["slice_axis"],
        configs.lists_to_tuples(known["flip_label_pairs"] or []),
    )


def _rounding(values: Values) -> tuple[int, ...]:
    data, known = values["data"], values["derived"]
    if (
        image_targets_of(known) is None
        or known["spatial_dims"] != 2
        or data.get("resize")
        or data.get("patch_size")
    ):
        return ()
    return tuple(prod(step[axis] for step in known["strides"]) for axis in range(2))


def _targets(record: Values) -> SegmentationTargets:
    return (
        SegmentationTargets((), ())
        if record["image_targets"] is not None
        else SegmentationTargets.from_plain(record["targets"])
    )
