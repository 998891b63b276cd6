"""The metadata of an exported model: its input, output, training and validation, as plain values."""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import medconv
from medconv.config import tuples_to_lists
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.features.export.graph import Captured
from medconv.inference.load import LoadedModel
from medconv.targets import Targets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.digests import digest

VERSION = 1
Metadata = dict[str, Any]

_FRAMED = (
    "none; after resampling, or scaling to `resize`, the middle `frame` is cut out, or padded with 0 on both "
    "sides"
)
_SMOOTHED = (
    "; before that, axes that get fewer voxels are smoothed by a Gaussian of (old / new - 1) / 2 voxels"
)

_NNUNET = (
    "; within the range of the image; where voxels are more than 3 times as long along one axis, slice by "
    "slice, and across that axis the nearest slice, also of the outputs"
)
_RESAMPLING = (
    "cubic splines, after normalisation; the outer edges of the first and last voxels keep their places"
)
_RESTORE = "each channel by linear interpolation to the cropped image's own grid"


def metadata_path(model: Path) -> Path:
    """`model.onnx` has its metadata in `model.onnx.json`."""
    return model.with_name(model.name + ".json")


def describe(
    content: Mapping[str, Any],
    model: LoadedModel,
    captured: Captured,
    file: Path,
    format: str,
    parity: Mapping[str, Any],
) -> Metadata:
    """The metadata of an exported model.

    Args:
        content: the checkpoint's.
        model: the network of the checkpoint.
        captured: the network as it was written.
        file: the exported model, where it is now.
        format: of the file.
        parity: the inputs of the comparison, and the largest difference.
    Returns:
        Numbers, texts and lists only.
    """
    assert model.path is not None
    metadata = {
        "medconv_metadata": VERSION,
        "format": format,
        "sha256": digest(file),
        "inputs": _inputs(model, captured),
        "windows": _windows(model),
        "outputs": _outputs(model),
        "training": _training(content["medconv"]),
        "validation": _validation(content["medconv"]),
        "parity": dict(parity),
        "checkpoint": {"name": model.path.name, "sha256": digest(model.path)},
        "versions": _versions(format),
    }
    # As a JSON file gives it back.
    return dict(json.loads(json.dumps(tuples_to_lists(metadata))))


def _versions(format: str) -> dict[str, str]:
    """Versions of what made the file, by name."""
    packages = ["torch", "monai"]
    if format == "onnx":
        packages += ["onnx", "onnxruntime"]
    return {
        "medconv": medconv.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _inputs(model: LoadedModel, captured: Captured) -> Metadata:
    preprocessing = model.preprocessing
    oriented = preprocessing.reorients
    axes = "towards right, anterior, superior" if oriented else "as stored"
    if preprocessing.image_dims == 2:
        axes += "; pictures are stored as displayed, rows to the left and columns to posterior"
    inputs: Metadata = {
        "name": "image",
        "layout": f"(batch, channels, *spatial) float32, axes {axes}",
        "channels": model.modalities,
        "spatial_dims": preprocessing.spatial_dims,
        "slice_axis": preprocessing.slice_axis,
        "orientation": "RAS" if oriented else "as stored",
        "crop": _crop(preprocessing),
        "frame": preprocessing.frame,
        "resize": preprocessing.resize,
        "rounding": model.rounding,
    }
    if model.source_spacing_mm:
        inputs["source_spacing_mm"] = model.source_spacing_mm
    return {
        **inputs,
        **_resampling(preprocessing),
        "spacing_range_mm": model.spacing_range_mm,
        "divisor": captured.divisor,
        "dynamic": {"batch": True, "spatial": captured.dynamic},
    }


def _crop(preprocessing: PreprocessingConfig) -> str:
    if preprocessing.frame is None:
        return "to the voxels that are not 0 in some channel"
    return f"{_FRAMED}{_SMOOTHED}" if preprocessing.smooths else _FRAMED


def _resampling(preprocessing: PreprocessingConfig) -> Metadata:
    """Spacing and intensities of the input."""
    convention = "" if preprocessing.convention is None else _NNUNET
    return {
        "spacing_mm": preprocessing.spacing_mm,
        "resampling": f"{_RESAMPLING}{convention}",
        "convention": preprocessing.convention,
        "normalisation": preprocessing.normalisation,
        "intensities": preprocessing.intensities,
    }


def _windows(model: LoadedModel) -> Metadata:
    window = model.window
    return {
        "patch_size": window.patch_size,
        "overlap": window.overlap,
        "weights": window.placement.description,
        "batch_size": window.batch_size,
        "mirror_axes": window.mirror_axes,
        "seen_axes": model.seen_axes,
        "equivariant_axes": model.equivariant_axes,
        "flip_label_pairs": window.flip_label_pairs,
    }


def _outputs(model: LoadedModel) -> Metadata:
    targets = model.targets
    background = list(model.class_names[:1]) if targets.num_outputs > len(targets.names) else []
    outputs: Metadata = {
        "name": "logits",
        "channels": [*background, *targets.output_names],
        "class_names": model.class_names,
        "targets": targets.plain(),
        "decode": targets.output_meaning,
    }
    if targets.per_voxel:
        outside = "background" if isinstance(targets, SegmentationTargets) else f"{targets.outside:g}"
        outputs["restore"] = f"{_RESTORE}; outside of it is {outside}"
    if model.temperature is not None:
        outputs["temperature"] = model.temperature
        outputs["decode"] = f"the outputs divided by the temperature, then {targets.output_meaning}"
    return outputs


def _training(record: Mapping[str, Any]) -> Metadata:
    values = record["config"]
    root = values["data"].get("root")
    cases = str(values["derived"].get("train_cases", "")).partition(" ")[0]
    return {
        "dataset": record.get("dataset") or (Path(str(root)).name if root else None),
        "cases": int(cases) if cases.isdigit() else None,
        "network": str(values["model"].get("_target_")),
        "conv": str(values["conv"].get("_target_")),
        "precision": str(values["trainer"]["precision"]),
    }


def _validation(record: Mapping[str, Any]) -> Metadata:
    rows = record.get("validation", {})
    return {"cases": len(rows), "scores": Targets.from_plain(record["targets"]).scores.summary(rows)}
