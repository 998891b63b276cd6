"""The metadata file beside an exported model: plain values, with all that prediction needs, and the
SHA-256 of the model that they describe.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medconv import config as configs
from medconv.data.per_case import check_source_spacing
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.inference.load import DAMAGED, LoadedModel, with_mirror_axes
from medconv.inference.sliding_window import SlidingWindow
from medconv.targets import Targets

VERSION = 1
Metadata = dict[str, Any]


def metadata_path(model: Path) -> Path:
    """`model.onnx` has its metadata in `model.onnx.json`."""
    return model.with_name(model.name + ".json")


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(model: Path) -> Metadata:
    """The metadata of an exported model.

    Raises:
        ValueError: one of the files is missing, or they do not belong together.
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
        version = metadata["medconv_metadata"]
        sha256 = str(metadata["sha256"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: damaged, or not the metadata of an exported model ({type(error).__name__}: {error})"
        ) from error
    if version != VERSION:
        raise ValueError(f"{path}: metadata of version {version!r:.20}, this medconv reads {VERSION}")
    actual_sha256 = digest(model)
    if actual_sha256 != sha256:
        raise ValueError(
            f"{path}: the metadata of another file, with SHA-256 {sha256[:12]}...; {model.name} has "
            f"{actual_sha256[:12]}..."
        )
    return dict(metadata)


def as_loaded_model(
    metadata: Metadata,
    network: nn.Module,
    model: Path,
    mirror_axes: Sequence[int] | None,
) -> LoadedModel:
    """The network, with what its metadata says.

    Args:
        network: the exported network, (batch, channels, *spatial) -> logits.
        model: its file.
        mirror_axes: of test-time augmentation; None: those of the metadata.
    Raises:
        ValueError: the metadata is incomplete or wrong, or the network never saw images mirrored along
            these axes.
    """
    try:
        loaded = _build_model(metadata, network, model)
    except (ValueError, *DAMAGED) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{metadata_path(model)}: damaged, it cannot be read ({reason})") from error
    if mirror_axes is None:
        return loaded
    return with_mirror_axes(loaded, mirror_axes)


def _build_model(metadata: Metadata, network: nn.Module, model: Path) -> LoadedModel:
    inputs = metadata["inputs"]
    windows = metadata["windows"]
    outputs = metadata["outputs"]
    preprocessing = _preprocessing(inputs)
    targets = Targets.from_plain(outputs["targets"])
    window = SlidingWindow(
        patch_size=tuple(windows["patch_size"]),
        overlap=windows["overlap"],
        batch_size=windows["batch_size"],
        mirror_axes=tuple(windows["mirror_axes"]),
        slice_axis=preprocessing.slice_axis,
        flip_label_pairs=configs.lists_to_tuples(windows["flip_label_pairs"]),
        even=preprocessing.convention is not None,
    )
    rounding = tuple(inputs.get("rounding", ()))
    _check_channels(inputs["channels"], preprocessing)
    _check_sizes(preprocessing, window, rounding)
    _check_flip_label_pairs(window, targets)
    source_spacing_mm = inputs.get("source_spacing_mm")
    if source_spacing_mm is not None:
        check_source_spacing(source_spacing_mm)
    return LoadedModel(
        network=network,
        preprocessing=preprocessing,
        window=window,
        class_names=tuple(outputs["class_names"]),
        targets=targets,
        modalities=tuple(inputs["channels"]),
        precision="32-true",
        memory_format=torch.contiguous_format,
        spacing_range_mm=tuple((float(low), float(high)) for low, high in inputs["spacing_range_mm"]),
        path=model,
        seen_axes=tuple(windows["seen_axes"]),
        equivariant_axes=tuple(windows["equivariant_axes"]),
        metadata_path=metadata_path(model),
        rounding=rounding,
        source_spacing_mm=source_spacing_mm,
    )


def _preprocessing(inputs: Metadata) -> PreprocessingConfig:
    values = {key: inputs[key] for key in ("spatial_dims", "spacing_mm", "normalisation", "slice_axis")}
    # Later versions added these; older files lack them.
    values |= {key: inputs.get(key) for key in ("frame", "resize", "convention")}
    values = {key: configs.lists_to_tuples(value) for key, value in values.items()}
    intensities = tuple(
        {str(name): float(value) for name, value in channel.items()} for channel in inputs["intensities"]
    )
    return PreprocessingConfig(intensities=intensities, **values)


# Values that contradict each other would fail later, or silently give wrong label maps.


def _check_channels(channels: Any, preprocessing: PreprocessingConfig) -> None:
    if not channels or not all(isinstance(name, str) for name in channels):
        raise ValueError(f"channels must be names, got {channels!r:.80}")
    if not len(preprocessing.normalisation) == len(preprocessing.intensities) == len(channels):
        raise ValueError(f"{len(channels)} channels need as many entries of normalisation and intensities")


def _check_sizes(
    preprocessing: PreprocessingConfig,
    window: SlidingWindow,
    rounding: Sequence[int],
) -> None:
    dims = preprocessing.spatial_dims
    if dims not in (2, 3) or preprocessing.slice_axis not in (None, 0, 1, 2):
        raise ValueError(
            f"spatial_dims must be 2 or 3, and slice_axis below 3, got {dims}, {preprocessing.slice_axis}"
        )
    sizes = {
        "patch_size": window.patch_size,
        "frame": preprocessing.frame,
        "resize": preprocessing.resize,
        "rounding": rounding or None,
    }
    for name, size in sizes.items():
        if size is None:
            continue
        if len(size) != dims or not all(type(voxels) is int and voxels > 0 for voxels in size):
            raise ValueError(f"{name} needs {dims} numbers of voxels, got {size}")


def _check_flip_label_pairs(window: SlidingWindow, targets: Targets) -> None:
    channels = range(targets.num_outputs)
    for left, right in window.flip_label_pairs:
        if left not in channels or right not in channels:
            raise ValueError(
                f"flip_label_pairs must name channels of {targets.num_outputs}, got {window.flip_label_pairs}"
            )
