"""The metadata of an exported model: its input, output, training and validation, as plain values."""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import medconv
from medconv.config import flatten, tuples_to_lists
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.export.graph import Captured
from medconv.inference.exported.metadata import VERSION, Metadata, digest
from medconv.inference.load import LoadedModel
from medconv.targets import Targets
from medconv.utils.logging import size_text

_FRAMED = (
    "none; after resampling, or scaling to `resize`, the middle `frame` is cut out, or padded with 0 on both "
    "sides"
)

_NNUNET = (
    "; within the range of the image; where voxels are more than 3 times as long along one axis, slice by "
    "slice, and across that axis the nearest slice, also of the outputs"
)
_RESAMPLING = (
    "cubic splines, after normalisation; the outer edges of the first and last voxels keep their places"
)
_RESTORE = "each channel by linear interpolation to the cropped image's own grid; outside of it is background"


# Of normalisations that need nothing but the image.
_FORMULAS = {
    "zscore": "minus its mean, divided by its standard deviation, over the cropped image",
    "zscore_nonzero": "of the voxels that are not 0 in some channel, and holes among them, minus their mean, "
    "divided by their standard deviation; others stay",
    "rescale": "its lowest value to 0, its highest to 1, over the cropped image",
    "none": "as it is",
}


def describe(
    content: Mapping[str, Any],
    model: LoadedModel,
    captured: Captured,
    file: Path,
    format: str,
    parity: Mapping[str, Any],
) -> Metadata:
    """The metadata of an exported model, as `inference.exported.metadata` reads it.

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
    """Of what made the file, by name."""
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
    # 2D images stay as they are.
    oriented = preprocessing.image_dims == 3 and preprocessing.reorients
    axes = "towards right, anterior, superior" if oriented else "as stored"
    inputs: Metadata = {
        "name": "image",
        "layout": f"(batch, channels, *spatial) float32, axes {axes}",
        "channels": model.modalities,
        "spatial_dims": preprocessing.spatial_dims,
        "slice_axis": preprocessing.slice_axis,
        "orientation": "RAS" if oriented else "as stored",
        "crop": "to the voxels that are not 0 in some channel" if preprocessing.frame is None else _FRAMED,
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
        "weights": "gaussian" if not window.even else "gaussian, windows at even distances as nnU-Net's",
        "batch_size": window.batch_size,
        "mirror_axes": window.mirror_axes,
        "seen_axes": model.seen_axes,
        "equivariant_axes": model.equivariant_axes,
        "flip_label_pairs": window.flip_label_pairs,
    }


def _outputs(model: LoadedModel) -> Metadata:
    targets = model.targets
    background = list(model.class_names[:1]) if targets.num_outputs > len(targets.names) else []
    outputs = {
        "name": "logits",
        "channels": [*background, *targets.output_names],
        "class_names": model.class_names,
        "targets": targets.plain(),
        "decode": targets.output_meaning,
    }
    if targets.per_voxel:
        outputs["restore"] = _RESTORE
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
    return {"cases": len(rows), "scores": Targets.from_plain(record["targets"]).summary(rows)}


def as_markdown(metadata: Metadata, name: str) -> str:
    """The metadata as Markdown. Args: name: of the file."""
    rows = {
        "file": f"`{name}`, {metadata['format']}, SHA-256 `{metadata['sha256']}`",
        **_input_rows(metadata["inputs"]),
        **_window_rows(metadata),
        **_size_rows(metadata["inputs"], metadata["windows"]),
        "output": _output_text(metadata["outputs"]),
        **_provenance_rows(metadata),
    }
    slice_axis = metadata["inputs"]["slice_axis"]
    if slice_axis is not None:
        rows["slices"] = (
            f"a 2D network on slices across axis {slice_axis} of volumes, each at its own distance"
        )
    # A bar would end the cell.
    lines = [f"| {key} | {value.replace('|', '/')} |" for key, value in rows.items()]
    return "\n".join([f"# {name}", "", "| | |", "|---|---|", *lines, ""])


def _input_rows(inputs: Metadata) -> dict[str, str]:
    channels = zip(inputs["channels"], inputs["normalisation"], inputs["intensities"], strict=True)
    return {
        "channels": ", ".join(inputs["channels"]),
        "orientation": f"{inputs['orientation']}; {inputs['layout']}",
        "spacing": f"{size_text(inputs['spacing_mm'])} mm; {inputs['resampling']}",
        "crop": inputs["crop"],
        "normalisation": "; ".join(_normalisation(*channel) for channel in channels),
    }


def _window_rows(metadata: Metadata) -> dict[str, str]:
    """Windows and label values of segmentation, or the image size of an image-level network."""
    windows = metadata["windows"]
    patch_size = size_text(windows["patch_size"])
    if "restore" not in metadata["outputs"]:
        return {"image": f"{patch_size} voxels"}
    targets = metadata["outputs"]["targets"]
    values = zip(targets["names"], targets["values"], strict=True)
    return {
        "windows": f"{patch_size} voxels, overlap {windows['overlap']:g}, weights {windows['weights']}",
        "label values": ", ".join(f"{name}: {value}" for name, value in values),
    }


def _size_rows(inputs: Metadata, windows: Metadata) -> dict[str, str]:
    axes = [
        "any multiple" if is_dynamic else "the patch's size" for is_dynamic in inputs["dynamic"]["spatial"]
    ]
    return {
        "sizes": f"any batch; along the axes: {', '.join(axes)} of {size_text(inputs['divisor'])}",
        "flips": str(windows["mirror_axes"] or "none"),
    }


def _output_text(outputs: Metadata) -> str:
    texts = [f"{outputs['targets']['kind']}: {', '.join(outputs['channels'])}"]
    texts += [outputs[key] for key in ("decode", "restore") if key in outputs]
    return "; ".join(texts)


def _provenance_rows(metadata: Metadata) -> dict[str, str]:
    training = metadata["training"]
    validation = metadata["validation"]
    parity = metadata["parity"]
    versions = [f"{package} {number}" for package, number in metadata["versions"].items()]
    return {
        "trained on": f"{training['dataset']}, {training['cases']} cases",
        "validation": "; ".join([f"{validation['cases']} cases", *_scores(validation)]),
        "parity": f"logits differ by at most {parity['largest_difference']:.2g} ({parity['inputs']})",
        "versions": ", ".join(versions),
    }


def _scores(validation: Metadata) -> list[str]:
    texts: list[str] = []
    for name, score in flatten(validation["scores"]).items():
        # An empty dict: no class was scored, as in a run without validation cases.
        is_number = isinstance(score, (int, float))
        texts.append(f"{name} {score:.4f}" if is_number else f"{name} not measured")
    return texts


def _normalisation(channel: str, name: str, intensities: Mapping[str, float]) -> str:
    return f"{channel}: {name}, {_formula(name, intensities)}"


def _formula(name: str, intensities: Mapping[str, float]) -> str:
    """What a normalisation does, in words."""
    if name in _FORMULAS:
        return _FORMULAS[name]
    if name == "dataset":
        return f"minus {intensities.get('mean', 0):g}, divided by {intensities.get('std', 1):g}"
    low = intensities["percentile_00_5"]
    high = intensities["percentile_99_5"]
    return (
        f"clipped to {low:g} and {high:g}, minus {intensities['mean']:g}, divided by {intensities['std']:g}"
    )
