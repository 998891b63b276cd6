"""Load a checkpoint: the network, with its convolutions folded, and the preprocessing that it needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from medconv import config as configs
from medconv.config import DataConfig, Derived, TaskConfig
from medconv.config import trusted as config_trusted
from medconv.convs import fold_convs
from medconv.convs import mirror_axes as mirror_axes_of
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.inference.sliding_window import SlidingWindow
from medconv.inference.tta import training_axes, usable_axes
from medconv.models.build import build_network, check_folding
from medconv.performance import switches
from medconv.performance.switches import apply_switches
from medconv.targets import Targets
from medconv.utils import checkpoint_io

# Errors that a damaged or forged file can cause in the objects that are built from it.
DAMAGED = (
    *(LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, AssertionError, MemoryError),
    OmegaConfBaseException,
)


@dataclass(frozen=True)
class LoadedModel:
    """A network from a checkpoint or an exported model, in evaluation mode, and all that prediction needs
    to know.

    Args:
        network: its convolutions are folded.
        targets: what its outputs mean; for image-level ones all images have the size `window.patch_size`, and
            flips along `window.mirror_axes` average the decoded outputs.
        spacing_range_mm: smallest and largest spacing of the training cases along each axis (right, anterior,
            superior).
        path: the checkpoint, or the exported model.
        seen_axes: axes along which the network saw mirrored images in training.
        equivariant_axes: axes along which a mirrored image gives mirrored logits by construction.
        metadata_path: the file beside an exported model that holds all of this; None: a checkpoint.
        rounding: if all training images were 2D and of one size, that size was rounded up to a multiple of
            this; else empty.
        source_spacing_mm: of images, in place of their headers, as in `data`; None: the headers.
        train_cases: names of the cases that the network was trained on; empty: not known.
    """

    network: nn.Module
    preprocessing: PreprocessingConfig
    window: SlidingWindow
    class_names: tuple[str, ...]
    targets: Targets
    modalities: tuple[str, ...]
    precision: str
    memory_format: torch.memory_format
    spacing_range_mm: tuple[tuple[float, float], ...] = ()
    path: Path | None = None
    seen_axes: tuple[int, ...] = ()
    equivariant_axes: tuple[int, ...] = ()
    metadata_path: Path | None = None
    rounding: tuple[int, ...] = ()
    source_spacing_mm: Any = None
    train_cases: frozenset[str] = frozenset()


def load(
    path: Path,
    trusted: Sequence[str] = (),
    device: str = "cpu",
    mirror_axes: Sequence[int] | None = None,
    plain: bool = False,
) -> LoadedModel:
    """Load a checkpoint: its network, with folded convolutions, and its preprocessing.

    Args:
        trusted: packages of your own that its network may come from.
        mirror_axes: spatial axes of test-time augmentation; None: those that it was validated with.
        plain: without the fast layers and memory layouts of `perf`, which only medconv has; for export.
    Raises: ValueError: missing, damaged, not a checkpoint of medconv, of another task, a class that is not
        allowed, or axes along which the network never saw a mirrored image.
    """
    content = checkpoint_io.read(path)
    try:
        targets = _targets(content["medconv"], path)
        model = _build_model(content, targets, path, trusted, mirror_axes, plain)
    except DAMAGED as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path}: damaged, or of another version: its metadata cannot be read ({reason})"
        ) from error
    model.network.to(device)
    return model


def _build_model(
    content: dict[str, Any],
    targets: Targets,
    path: Path,
    trusted: Sequence[str],
    mirror_axes: Sequence[int] | None,
    plain: bool,
) -> LoadedModel:
    metadata, config = content["medconv"], configs.from_plain(content["medconv"]["config"])
    derived, perf, dims = config.derived, config.perf, config.derived.spatial_dims
    build = partial(config_trusted.build_trusted, trusted=trusted)
    network = targets.finish(build_network(config.model, config.conv, derived, build, quiet=True))
    checkpoint_io.load_weights(network, content, path)
    seen, equivariant = training_axes(config.augmentation, dims), mirror_axes_of(network)
    if mirror_axes is None:
        axes = usable_axes(config.task.mirror_axes, dims, seen, equivariant)
    else:
        axes = usable_axes(mirror_axes, dims, seen, equivariant, "--mirror-axes")
    check_folding(network, derived)
    network = fold_convs(network).eval()
    channels_last, fast_norm = (bool(on) and not plain for on in (perf.channels_last, perf.fast_norm))
    fast_depthwise = perf.fast_depthwise and not plain
    apply_switches(network, channels_last=channels_last, fast_norm=fast_norm, fast_depthwise=fast_depthwise)
    return LoadedModel(
        network,
        PreprocessingConfig(
            **{key: configs.lists_to_tuples(value) for key, value in metadata["preprocessing"].items()}
        ),
        window_of(config.task, derived, axes, config.data.convention),
        tuple(metadata["class_names"]),
        targets,
        tuple(metadata["modalities"]),
        str(config.trainer.precision),
        switches.memory_format(channels_last, dims),
        tuple((float(low), float(high)) for low, high in metadata["spacing_range_mm"]),
        path,
        seen,
        equivariant,
        rounding=() if targets.per_voxel else _rounding(config.data, derived),
        source_spacing_mm=config.data.source_spacing_mm,
        train_cases=frozenset(metadata.get("train_cases", ())),
    )


def with_window(
    model: LoadedModel, overlap: float | None = None, batch_size: int | None = None
) -> LoadedModel:
    """The same network with other windows; None keeps what it was validated with. Raises: ValueError: a value
    that is out of range.
    """
    values: dict[str, Any] = {"overlap": overlap, "batch_size": batch_size}
    changes = {key: value for key, value in values.items() if value is not None}
    return replace(model, window=replace(model.window, **changes))


def window_of(
    task: TaskConfig, derived: Derived, axes: tuple[int, ...], convention: str | None
) -> SlidingWindow:
    """The windows over volumes. Args: axes: of mirror test-time augmentation. convention: of `data`."""
    return SlidingWindow(
        tuple(derived.patch_size),
        task.overlap,
        task.sw_batch_size,
        axes,
        derived.slice_axis,
        configs.lists_to_tuples(derived.flip_label_pairs or []),
        even=convention is not None,
    )


def _targets(metadata: dict[str, Any], path: Path) -> Targets:
    try:
        return Targets.from_plain(metadata["targets"])
    except ValueError as error:
        raise ValueError(f"{path}: of another task, or of another version: {error}") from error


def _rounding(data: DataConfig, derived: Derived) -> tuple[int, ...]:
    if derived.spatial_dims != 2 or data.resize or data.patch_size:
        return ()
    return tuple(prod(step[axis] for step in derived.strides) for axis in range(2))
