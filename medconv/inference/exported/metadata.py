"""The metadata file beside an exported model: plain values, with all that prediction needs, and the
SHA-256 of the model that they describe.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medconv import config as configs
from medconv.config import ConfigError
from medconv.data.per_case import check_source_spacing
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.inference.load import DAMAGED, LoadedModel
from medconv.inference.sliding_window import SlidingWindow
from medconv.inference.tta import usable_axes
from medconv.targets import Targets

VERSION = 1
Metadata = dict[str, Any]


def metadata_path(model: Path) -> Path:
    """`model.onnx` has its metadata in `model.onnx.json`, and the same as Markdown in `model.onnx.md`."""
    return model.with_name(model.name + ".json")


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(model: Path) -> Metadata:
    """The metadata of an exported model. Raises: ValueError: one of the files is missing, or they do not
    belong together.
    """
    if not model.is_file():
        raise ValueError(f"{model}: no such file")
    path = metadata_path(model)
    if not path.is_file():
        raise ValueError(
            f"{model}: its metadata file {path.name} is not beside it; it describes the network's input"
        )
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
        version, sha256 = metadata["medconv_metadata"], str(metadata["sha256"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: damaged, or not the metadata of an exported model ({type(error).__name__}: {error})"
        ) from error
    if version != VERSION:
        raise ValueError(f"{path}: metadata of version {version!r:.20}, this medconv reads {VERSION}")
    if (actual := digest(model)) != sha256:
        raise ValueError(
            f"{path}: the metadata of another file, with SHA-256 {sha256[:12]}...; {model.name} has "
            f"{actual[:12]}..."
        )
    return dict(metadata)


def as_loaded_model(
    metadata: Metadata, network: nn.Module, model: Path, mirror_axes: Sequence[int] | None
) -> LoadedModel:
    """The network, with what its metadata says.

    Args: mirror_axes: of test-time augmentation; None: those of the metadata.
    Raises: ValueError: the metadata is incomplete or wrong, or the network never saw images mirrored along
        these axes.
    """
    path = metadata_path(model)
    try:
        loaded = _build_model(metadata, network, model)
    except (ValueError, *DAMAGED) as error:
        raise ValueError(f"{path}: damaged, it cannot be read ({type(error).__name__}: {error})") from error
    if mirror_axes is None:
        return loaded
    dims = loaded.preprocessing.spatial_dims
    try:
        axes = usable_axes(mirror_axes, dims, loaded.seen_axes, loaded.equivariant_axes)
    except ValueError as error:
        raise ConfigError(str(error).replace("task.mirror_axes", "--mirror-axes")) from error
    return replace(loaded, window=replace(loaded.window, mirror_axes=axes))


def _build_model(metadata: Metadata, network: nn.Module, model: Path) -> LoadedModel:
    inputs, windows, outputs = metadata["inputs"], metadata["windows"], metadata["outputs"]
    required = {key: inputs[key] for key in ("spatial_dims", "spacing_mm", "normalisation", "slice_axis")}
    optional = {key: inputs.get(key) for key in ("frame", "resize", "convention")}
    values = {key: configs.lists_to_tuples(value) for key, value in (required | optional).items()}
    preprocessing = PreprocessingConfig(intensities=_numbers(inputs["intensities"]), **values)
    targets = Targets.from_plain(outputs["targets"])
    window = SlidingWindow(
        tuple(windows["patch_size"]),
        windows["overlap"],
        windows["batch_size"],
        tuple(windows["mirror_axes"]),
        preprocessing.slice_axis,
        configs.lists_to_tuples(windows["flip_label_pairs"]),
        even=preprocessing.convention is not None,
    )
    rounding = tuple(inputs.get("rounding", ()))
    _check(preprocessing, window, inputs, targets)
    return LoadedModel(
        network,
        preprocessing,
        window,
        tuple(outputs["class_names"]),
        targets,
        tuple(inputs["channels"]),
        "32-true",
        torch.contiguous_format,
        tuple((float(low), float(high)) for low, high in inputs["spacing_range_mm"]),
        model,
        tuple(windows["seen_axes"]),
        tuple(windows["equivariant_axes"]),
        metadata_path(model),
        rounding,
        inputs.get("source_spacing_mm"),
    )


def _check(
    preprocessing: PreprocessingConfig,
    window: SlidingWindow,
    inputs: Metadata,
    targets: Targets,
) -> None:
    """Raises: ValueError: values that contradict each other, which would fail later, or silently be wrong."""
    channels = inputs["channels"]
    if not all(isinstance(name, str) for name in channels) or not channels:
        raise ValueError(f"channels must be names, got {channels!r:.80}")
    if not len(preprocessing.normalisation) == len(preprocessing.intensities) == len(channels):
        raise ValueError(f"{len(channels)} channels need as many entries of normalisation and intensities")
    if preprocessing.spatial_dims not in (2, 3) or preprocessing.slice_axis not in (None, 0, 1, 2):
        raise ValueError(
            f"spatial_dims must be 2 or 3, and slice_axis below 3, got {preprocessing.spatial_dims}, "
            f"{preprocessing.slice_axis}"
        )
    size = window.patch_size
    if len(size) != preprocessing.spatial_dims or not all(type(n) is int and n > 0 for n in size):
        raise ValueError(f"patch_size needs {preprocessing.spatial_dims} numbers of voxels, got {size}")
    for key, numbers in (
        ("frame", preprocessing.frame),
        ("resize", preprocessing.resize),
        ("rounding", inputs.get("rounding") or None),
    ):
        if numbers is not None and not (
            len(numbers) == len(size) and all(type(n) is int and n > 0 for n in numbers)
        ):
            raise ValueError(f"{key} needs {len(size)} numbers of voxels, got {numbers}")
    if (stated := inputs.get("source_spacing_mm")) is not None:
        check_source_spacing(stated)
    if any(not 0 <= index < targets.num_outputs for pair in window.flip_label_pairs for index in pair):
        raise ValueError(
            f"flip_label_pairs must name channels of {targets.num_outputs}, got {window.flip_label_pairs}"
        )


def _numbers(content: Any) -> tuple[dict[str, float], ...]:
    return tuple({str(name): float(value) for name, value in channel.items()} for channel in content)
