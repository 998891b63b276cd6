"""Load a checkpoint: the network, with its convolutions folded, and the preprocessing that it needs; and the
checkpoints that the folder of a run stands for.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

import medconv
from medconv import config as configs
from medconv.config import DataConfig, Derived, RunConfig
from medconv.config import trusted as config_trusted
from medconv.config.instantiate import add_package, check_named
from medconv.convs import fold_convs
from medconv.convs import mirror_axes as mirror_axes_of
from medconv.data.datasets import patterns
from medconv.data.io.raster import are_picture_channels
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.data.preprocessing.value_bands import Band
from medconv.inference.sliding_window import SlidingWindow, training_axes, usable_axes, window_of
from medconv.models.build import build_network, check_folding, has_own_layers
from medconv.models.outputs import full_resolution
from medconv.performance import switches
from medconv.performance.switches import apply_switches
from medconv.targets import Targets
from medconv.targets.scores import LARGEST_TEMPERATURE
from medconv.utils import checkpoint_io
from medconv.utils.errors import with_class
from medconv.utils.hardware import autocast_dtype

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
_NAMES = ("best.ckpt", "last.ckpt")  # the last one where nothing was validated
# Of the run itself and of further members. Not of any run in a folder: unrelated ones would be averaged.
_CHECKPOINTS = ("checkpoints", "members/*/checkpoints")
MOVED_ASIDE = re.compile(r"\.\d{8}-\d{6}$")  # by run.resume=never


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
        value_bands: where the values of the training cases lie, of each channel; empty: not known.
        path: the checkpoint.
        seen_axes: axes along which the network saw mirrored images in training.
        equivariant_axes: axes along which a mirrored image gives mirrored logits by construction.
        rounding: if all training images were 2D and of one size, that size was rounded up to a multiple of
            this; else empty.
        source_spacing_mm: of images, in place of their headers, as in `data`; None: the headers.
        train_cases: names of the cases that the network was trained on; empty: not known.
        temperature: what logits are divided by before softmax or sigmoid; None: they are not divided.
        takes_missing: whether it was trained to predict cases that lack channels.
        takes_pixels: whether it was trained on pictures, whose pixels have no size in mm.
        image_patterns: of the files of each channel in training, from their common folder on, such as
            `*_t1.nii.gz`; empty: their names are the case ids.
        path_column: of tables, with the image files; `path` is taken, too.
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
    value_bands: tuple[Band | None, ...] = ()
    path: Path | None = None
    seen_axes: tuple[int, ...] = ()
    equivariant_axes: tuple[int, ...] = ()
    rounding: tuple[int, ...] = ()
    source_spacing_mm: Any = None
    train_cases: frozenset[str] = frozenset()
    temperature: float | None = None
    takes_missing: bool = False
    takes_pixels: bool = False
    image_patterns: tuple[str, ...] = ()
    path_column: str = "path"

    def outputs(self, images: Tensor) -> Tensor:
        """The network's outputs, in its precision and memory format, without those of deep supervision."""
        dtype = autocast_dtype(self.precision)
        with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
            return full_resolution(self.network(images.to(memory_format=self.memory_format)))


def checkpoints_of(path: Path) -> list[Path]:
    """The checkpoint to predict with of a run, and of each of its members; a file stands for itself.

    Raises:
        ValueError: the folder is not that of a run, or one has not been trained to its end.
    """
    if not path.is_dir():
        return [path]
    if not (path / "checkpoints").is_dir():
        raise ValueError(f"{path}: not the folder of a run, expected RUN or RUN/checkpoints/best.ckpt")
    found = []
    for pattern in _CHECKPOINTS:
        for checkpoints in sorted(path.glob(pattern)):
            run = checkpoints.parent
            files = [checkpoints / name for name in _NAMES if (checkpoints / name).is_file()]
            if run != path and MOVED_ASIDE.search(run.name):  # an old member, not what the user names
                continue
            _check_finished(run)
            if not files:
                raise ValueError(f"{run}: its training is not done (no checkpoint); train it to its end")
            found.append(files[0])
    return found


def _check_finished(run: Path) -> None:
    """Raises: ValueError: its summary says that it has not been trained to its end."""
    try:
        status = json.loads((run / "summary.json").read_text(encoding="utf-8")).get("status")
    except (OSError, ValueError, AttributeError):
        return  # of another program, which says nothing
    if status not in (None, "done"):
        raise ValueError(
            f"{run}: its training is not done (status: {status}); train it to its end, or name the "
            "checkpoints one by one"
        )


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
    # The user vouches for them; classes that nobody vouches for are not built.
    for package in trusted:
        add_package(package)
    metadata = content["medconv"]
    with explaining_damage(path, metadata):
        # The file may come from anywhere: size, packages and classes are checked before they are used.
        config_trusted.check_size(metadata["config"], f"{path}: config")
        check_named(metadata["config"]["run"].get("packages"), path)
        try:
            targets = Targets.from_plain(metadata["targets"])
        except ValueError as error:
            raise ValueError(f"{path}: belongs to another task or another version: {error}") from error
        config = configs.from_plain(metadata["config"])
        if plain:
            perf = replace(config.perf, channels_last=False, fast_norm=False, fast_depthwise=False)
            config = replace(config, perf=perf)
        # The network with its weights, as in training.
        build = partial(config_trusted.build_trusted, trusted=trusted)
        network = build_network(config.model, config.conv, config.derived, build, weights_follow=True)
        network = targets.finish(network)
        checkpoint_io.load_weights(network, content, path)
        model = _loaded(network, metadata, config, targets, path, mirror_axes)
    model.network.to(device)
    return model


def _loaded(
    trained: nn.Module,
    metadata: dict[str, Any],
    config: RunConfig,
    targets: Targets,
    path: Path,
    mirror_axes: Sequence[int] | None,
) -> LoadedModel:
    """The network as prediction runs it, folded, and what it needs to know."""
    derived, perf = config.derived, config.perf
    # Axes of flips: asked before folding, which removes the layers that tell them.
    equivariant_axes = mirror_axes_of(trained)
    seen_axes = training_axes(config.augmentation, derived.spatial_dims)
    # An argument of the caller, or a key of the config.
    names = configs.arguments_as_keys("task") if mirror_axes is None else nullcontext()
    with names:
        requested = config.task.mirror_axes if mirror_axes is None else mirror_axes
        axes = usable_axes(requested, derived.spatial_dims, seen_axes, equivariant_axes)
    # Convolutions are folded, and get the fast layers and memory layouts of `perf`.
    if has_own_layers(trained):
        check_folding(trained, derived)
    network = apply_switches(
        fold_convs(trained).eval(),
        channels_last=bool(perf.channels_last),
        fast_norm=bool(perf.fast_norm),
        fast_depthwise=perf.fast_depthwise,
    )
    temperature = metadata.get("temperature") if targets.calibrated else None
    if temperature is not None and not (
        type(temperature) is float and 1 <= temperature <= LARGEST_TEMPERATURE
    ):
        raise ValueError(
            f"{path}: temperature: expected a number from 1 to {LARGEST_TEMPERATURE:g}, "
            f"got {temperature!r:.40}"
        )
    # New images are found by the names that training used. `data.images`: a pattern or folder, or one for
    # each channel by its name.
    images = config.data.images
    texts = list(images.values()) if isinstance(images, Mapping) else [images]
    are_patterns = all(isinstance(text, str) and patterns.is_pattern(text) for text in texts)
    if are_patterns:  # some may be absolute, others below the root
        texts = [str(Path(config.data.root or "", text).absolute()) for text in texts]
    values = {key: configs.lists_to_tuples(value) for key, value in metadata["preprocessing"].items()}
    preprocessing = PreprocessingConfig(**values)
    if preprocessing.image_dims == 2 and "single_slices" not in values:
        raise ValueError(
            f"{path}: was trained on single slices when each format had its own axes, so it would see images "
            "upside down; expected a checkpoint of this version, train it again"
        )
    return LoadedModel(
        network=network,
        preprocessing=preprocessing,
        window=window_of(config.task, derived, axes, config.data.convention),
        class_names=tuple(metadata["class_names"]),
        targets=targets,
        modalities=tuple(metadata["modalities"]),
        precision=str(config.trainer.precision),
        memory_format=switches.memory_format(bool(perf.channels_last), derived.spatial_dims),
        spacing_range_mm=tuple((float(low), float(high)) for low, high in metadata["spacing_range_mm"]),
        value_bands=tuple(band and Band.from_plain(band) for band in metadata.get("value_bands", ())),
        path=path,
        seen_axes=seen_axes,
        equivariant_axes=equivariant_axes,
        # Whole images of one size are framed.
        rounding=() if preprocessing.frame is None else _rounding(config.data, derived),
        source_spacing_mm=config.data.source_spacing_mm,
        train_cases=frozenset(metadata.get("train_cases", ())),
        temperature=temperature,
        takes_missing=config.data.missing is not None,
        takes_pixels=are_picture_channels(metadata["modalities"]) and config.data.source_spacing_mm is None,
        image_patterns=patterns.below_home(texts) if are_patterns else (),
        path_column=config.data.path_column,
    )


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
            f"{path}: damaged, or written by another version{_version(metadata)}: "
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
