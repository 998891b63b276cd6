"""Load a checkpoint: the network, with its convolutions folded, and the preprocessing that it needs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from omegaconf.errors import OmegaConfBaseException
from torch import nn

import medconv
from medconv import config as configs
from medconv.config import DataConfig, Derived, PerfConfig, RunConfig, TaskConfig
from medconv.config import trusted as config_trusted
from medconv.config.instantiate import add_package, check_named
from medconv.convs import fold_convs
from medconv.convs import mirror_axes as mirror_axes_of
from medconv.data.datasets import patterns
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.inference.sliding_window import (
    EVEN_DISTANCE,
    FIXED_DISTANCE,
    SlidingWindow,
    check_batch_size,
    check_overlap,
    training_axes,
    usable_axes,
)
from medconv.metrics.calibration import LARGEST_TEMPERATURE
from medconv.models.build import build_network, check_folding
from medconv.performance import switches
from medconv.performance.switches import apply_switches
from medconv.targets import Targets
from medconv.utils import checkpoint_io
from medconv.utils.errors import with_class

# Errors that a damaged or forged file can cause in the objects that are built from it.
_ERRORS = (
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
    OmegaConfBaseException,
)


@dataclass(frozen=True)
class LoadedModel:
    """A network from a checkpoint, in evaluation mode, and all that prediction needs to know.

    Args:
        network: its convolutions are folded.
        preprocessing: how images become the network's input.
        window: size and overlap of its windows, and the axes of test-time augmentation.
        class_names: of label maps, by label value, the first is the background; else the targets' names.
        targets: what its outputs mean. For image-level ones all images have the size `window.patch_size`, and
            flips along `window.mirror_axes` average the decoded outputs.
        modalities: names of the input channels.
        precision: Lightning's `trainer.precision`, in which it was validated.
        memory_format: of its input.
        spacing_range_mm: smallest and largest spacing of the training cases along each axis (right, anterior,
            superior).
        path: the checkpoint.
        seen_axes: axes along which the network saw mirrored images in training.
        equivariant_axes: axes along which a mirrored image gives mirrored logits by construction.
        rounding: if all training images were 2D and of one size, that size was rounded up to a multiple of
            this; else empty.
        source_spacing_mm: of images, in place of their headers, as in `data`; None: the headers.
        train_cases: names of the cases that the network was trained on; empty: not known.
        temperature: what logits are divided by before softmax or sigmoid; None: they are not divided.
        takes_missing: whether it was trained to predict cases that lack channels.
        image_patterns: of the files of each channel in training, from their common folder on, such as
            `*_t1.nii.gz`; empty: their names are the case ids.
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
    rounding: tuple[int, ...] = ()
    source_spacing_mm: Any = None
    train_cases: frozenset[str] = frozenset()
    temperature: float | None = None
    takes_missing: bool = False
    image_patterns: tuple[str, ...] = ()


def load(
    path: Path,
    trusted: Sequence[str] = (),
    device: str = "cpu",
    mirror_axes: Sequence[int] | None = None,
    plain: bool = False,
) -> LoadedModel:
    """Load a checkpoint: its network, with folded convolutions, and its preprocessing.

    Args:
        path: the checkpoint, such as `runs/NAME/checkpoints/best.ckpt`.
        trusted: packages of your own; they are imported, and its network may come from them.
        device: where the network runs, as torch names it.
        mirror_axes: spatial axes of test-time augmentation; None: those that it was validated with.
        plain: without the fast layers and memory layouts of `perf`, which only medconv has; for export.
    Raises:
        ValueError: missing, damaged, not a checkpoint of medconv, of another task, a class that is not
            allowed, or axes along which the network never saw a mirrored image.
    """
    content = checkpoint_io.read(path)
    for package in trusted:
        add_package(package)
    with explaining_damage(path, content["medconv"]):
        config_trusted.check_size(content["medconv"]["config"], f"{path}: config")
        check_named(content["medconv"]["config"]["run"].get("packages"), path)
        targets = _targets(content["medconv"], path)
        config = configs.from_plain(content["medconv"]["config"])
        if plain:
            config = replace(config, perf=_plain(config.perf))
        model = _build_model(content, config, targets, path, trusted)
        if mirror_axes is not None:
            model = with_mirror_axes(model, mirror_axes)
        else:
            with configs.arguments_as_keys("task"):
                model = with_mirror_axes(model, config.task.mirror_axes)
    model.network.to(device)
    return model


def _plain(perf: PerfConfig) -> PerfConfig:
    return replace(perf, channels_last=False, fast_norm=False, fast_depthwise=False)


def _build_model(
    content: dict[str, Any], config: RunConfig, targets: Targets, path: Path, trusted: Sequence[str]
) -> LoadedModel:
    """The model, without flips."""
    metadata = content["medconv"]
    derived = config.derived
    network = _build_trained(content, config, targets, path, trusted)
    # Before folding, which removes the layers that tell them.
    equivariant_axes = mirror_axes_of(network)
    preprocessing = {key: configs.lists_to_tuples(value) for key, value in metadata["preprocessing"].items()}
    return LoadedModel(
        network=_for_inference(network, config),
        preprocessing=PreprocessingConfig(**preprocessing),
        window=window_of(config.task, derived, (), config.data.convention),
        class_names=tuple(metadata["class_names"]),
        targets=targets,
        modalities=tuple(metadata["modalities"]),
        precision=str(config.trainer.precision),
        memory_format=switches.memory_format(bool(config.perf.channels_last), derived.spatial_dims),
        spacing_range_mm=tuple((float(low), float(high)) for low, high in metadata["spacing_range_mm"]),
        path=path,
        seen_axes=training_axes(config.augmentation, derived.spatial_dims),
        equivariant_axes=equivariant_axes,
        rounding=() if targets.per_voxel else _rounding(config.data, derived),
        source_spacing_mm=config.data.source_spacing_mm,
        train_cases=frozenset(metadata.get("train_cases", ())),
        temperature=_temperature(metadata, targets, path),
        takes_missing=config.data.missing is not None,
        image_patterns=_image_patterns(config.data.images),
    )


def _image_patterns(images: Any) -> tuple[str, ...]:
    """Args: images: `data.images`, a pattern or folder, or one for each channel by its name."""
    texts = list(images.values()) if isinstance(images, Mapping) else [images]
    are_patterns = all(isinstance(text, str) and patterns.is_pattern(text) for text in texts)
    return patterns.below_home(texts) if are_patterns else ()


def _build_trained(
    content: dict[str, Any], config: RunConfig, targets: Targets, path: Path, trusted: Sequence[str]
) -> nn.Module:
    """The network with its weights, as in training."""
    build = partial(config_trusted.build_trusted, trusted=trusted)
    trained = build_network(config.model, config.conv, config.derived, build, quiet=True)
    network = targets.finish(trained)
    checkpoint_io.load_weights(network, content, path)
    return network


def _temperature(metadata: dict[str, Any], targets: Targets, path: Path) -> float | None:
    """Raises: ValueError: not a number that logits can be divided by."""
    temperature = metadata.get("temperature")
    if temperature is None or not targets.calibrated:
        return None
    if type(temperature) is not float or not 1 <= temperature <= LARGEST_TEMPERATURE:
        raise ValueError(
            f"{path}: temperature: expected a number from 1 to {LARGEST_TEMPERATURE:g}, "
            f"got {temperature!r:.40}"
        )
    return temperature


def _for_inference(network: nn.Module, config: RunConfig) -> nn.Module:
    """The network with folded convolutions, and the fast layers and memory layouts of `perf`."""
    check_folding(network, config.derived)
    network = fold_convs(network).eval()
    apply_switches(
        network,
        channels_last=bool(config.perf.channels_last),
        fast_norm=bool(config.perf.fast_norm),
        fast_depthwise=config.perf.fast_depthwise,
    )
    return network


def with_mirror_axes(model: LoadedModel, mirror_axes: Any) -> LoadedModel:
    """The same network with other flips in test-time augmentation.

    Args:
        mirror_axes: spatial axes, `all` or None.
    Raises:
        ArgumentError: not spatial axes, or axes along which the network never saw a mirrored image.
    """
    axes = usable_axes(mirror_axes, model.preprocessing.spatial_dims, model.seen_axes, model.equivariant_axes)
    return replace(model, window=replace(model.window, mirror_axes=axes))


def with_window(
    model: LoadedModel, overlap: float | None = None, batch_size: int | None = None
) -> LoadedModel:
    """The same network with other windows; None keeps what it was validated with.

    Raises:
        ArgumentError: a value that is out of range.
    """
    window = model.window
    if overlap is not None:
        window = replace(window, overlap=overlap)
    if batch_size is not None:
        window = replace(window, batch_size=batch_size)
    return replace(model, window=window)


def window_of(
    task: TaskConfig, derived: Derived, axes: tuple[int, ...], convention: str | None
) -> SlidingWindow:
    """The windows over volumes.

    Args:
        axes: of mirror test-time augmentation.
        convention: of `data`.
    Raises:
        ConfigError: a key of `task` is out of range.
    """
    with configs.arguments_as_keys("task"):
        check_overlap("overlap", task.overlap)
        check_batch_size("sw_batch_size", task.sw_batch_size)
    return SlidingWindow(
        patch_size=tuple(derived.patch_size),
        overlap=task.overlap,
        batch_size=task.sw_batch_size,
        mirror_axes=axes,
        slice_axis=derived.slice_axis,
        flip_label_pairs=configs.lists_to_tuples(derived.flip_label_pairs or []),
        placement=FIXED_DISTANCE if convention is None else EVEN_DISTANCE,
    )


def _targets(metadata: dict[str, Any], path: Path) -> Targets:
    try:
        return Targets.from_plain(metadata["targets"])
    except ValueError as error:
        raise ValueError(f"{path}: of another task, or of another version: {error}") from error


def _rounding(data: DataConfig, derived: Derived) -> tuple[int, ...]:
    """What the training images' common size was rounded up to a multiple of; empty: nothing was."""
    if derived.spatial_dims != 2 or data.resize or data.patch_size:
        return ()
    return tuple(prod(step[axis] for step in derived.strides) for axis in range(2))


@contextmanager
def explaining_damage(path: Path, metadata: Any) -> Iterator[None]:
    """Inside, an error that damaged metadata causes becomes one that names the checkpoint.

    Args:
        metadata: of the checkpoint, not checked yet.
    Raises:
        ValueError: instead of such an error.
    """
    try:
        yield
    except _ERRORS as error:
        raise ValueError(
            f"{path}: damaged, or of another version{_version(metadata)}: "
            f"its metadata cannot be read ({_damage(error)})"
        ) from error


def _damage(error: BaseException) -> str:
    """An error on one line, with the key of the config that it is about."""
    key = getattr(error, "full_key", None)
    return f"config.{key}: {with_class(error)}" if key else with_class(error)


def _version(metadata: Any) -> str:
    """The version that wrote a checkpoint, in words; empty if it does not say."""
    written_by = metadata.get("version") if isinstance(metadata, dict) else None
    if not isinstance(written_by, str):
        return ""
    return f" (written by medconv {written_by[:20]}, this is {medconv.__version__})"
