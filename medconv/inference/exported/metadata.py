"""The card beside an exported file: plain values that say all that prediction needs, and of which file
they say it.
"""

from __future__ import annotations

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
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.inference.load import DAMAGED, LoadedModel
from medconv.inference.sliding_window import SlidingWindow
from medconv.inference.tta import usable_axes
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.segmentation import SegmentationTargets

VERSION = 1
Card = dict[str, Any]


def metadata_path(model: Path) -> Path:
    """`model.onnx` has its card in `model.onnx.json`, and the same in words in `model.onnx.md`."""
    return model.with_name(model.name + ".json")


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(model: Path) -> Card:
    """The card of an exported file. Raises: ValueError: either is missing, or the card is another file's."""
    if not model.is_file():
        raise ValueError(f"{model}: no such file")
    path = metadata_path(model)
    if not path.is_file():
        raise ValueError(
            f"{model}: its card, {path.name}, is not beside it; it says what the network's input must look "
            "like"
        )
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
        version, sha256 = card["medconv_card"], str(card["sha256"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: damaged, or no card of an exported network ({type(error).__name__}: {error})"
        ) from error
    if version != VERSION:
        raise ValueError(f"{path}: a card of version {version!r:.20}, this medconv reads {VERSION}")
    if (found := digest(model)) != sha256:
        raise ValueError(
            f"{path}: the card of another file: it is for one of SHA-256 {sha256[:12]}..., {model.name} has "
            f"{found[:12]}..."
        )
    return dict(card)


def as_trained(card: Card, network: nn.Module, model: Path, mirror_axes: Sequence[int] | None) -> LoadedModel:
    """What the card says, with the network of its file.

    Args: mirror_axes: of test-time augmentation, in the place of the card's.
    Raises: ValueError: something is missing or wrong in the card, or the network never saw images mirrored
    along these axes.
    """
    path = metadata_path(model)
    try:
        trained = _trained(card, network, model)
    except (ValueError, *DAMAGED) as error:
        raise ValueError(f"{path}: damaged, it cannot be read ({type(error).__name__}: {error})") from error
    if mirror_axes is None:
        return trained
    dims = trained.recipe.spatial_dims
    try:
        axes = usable_axes(mirror_axes, dims, trained.seen_axes, trained.equivariant_axes)
    except ValueError as error:
        raise ConfigError(str(error).replace("task.mirror_axes", "--mirror-axes")) from error
    return replace(trained, window=replace(trained.window, mirror_axes=axes))


def _trained(card: Card, network: nn.Module, model: Path) -> LoadedModel:
    inputs, windows, outputs = card["inputs"], card["windows"], card["outputs"]
    given = {
        key: configs.lists_to_tuples(inputs[key])
        for key in ("spatial_dims", "spacing_mm", "normalisation", "slice_axis")
    }
    whole = {
        key: configs.lists_to_tuples(inputs[key])
        for key in ("frame", "resize")
        if inputs.get(key) is not None
    }
    recipe = PreprocessingConfig(**given, intensities=_numbers(inputs["intensities"]), **whole)
    image_targets = (
        ImageLevelTargets.from_plain(outputs["image_targets"]) if "image_targets" in outputs else None
    )
    targets = (
        SegmentationTargets((), ())
        if image_targets is not None
        else SegmentationTargets.from_plain(outputs["targets"])
    )
    window = SlidingWindow(
        tuple(windows["patch_size"]),
        windows["overlap"],
        windows["batch_size"],
        tuple(windows["mirror_axes"]),
        recipe.slice_axis,
        configs.lists_to_tuples(windows["flip_label_pairs"]),
    )
    rounding = tuple(inputs.get("rounding", ()))
    _check(recipe, window, inputs, image_targets or targets)
    return LoadedModel(
        network,
        recipe,
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
        image_targets,
        rounding,
    )


def _check(
    recipe: PreprocessingConfig,
    window: SlidingWindow,
    inputs: Card,
    asked: SegmentationTargets | ImageLevelTargets,
) -> None:
    """Raises: ValueError: what does not fit together, and would fail later or not at all."""
    channels = inputs["channels"]
    if not all(isinstance(name, str) for name in channels) or not channels:
        raise ValueError(f"channels must be names, got {channels!r:.80}")
    if not len(recipe.normalisation) == len(recipe.intensities) == len(channels):
        raise ValueError(f"{len(channels)} channels need as many entries of normalisation and intensities")
    if recipe.spatial_dims not in (2, 3) or recipe.slice_axis not in (None, 0, 1, 2):
        raise ValueError(
            f"spatial_dims must be 2 or 3, and slice_axis below 3, got {recipe.spatial_dims}, "
            f"{recipe.slice_axis}"
        )
    size = window.patch_size
    if len(size) != recipe.spatial_dims or not all(type(n) is int and n > 0 for n in size):
        raise ValueError(f"patch_size needs {recipe.spatial_dims} numbers of voxels, got {size}")
    for key, numbers in (
        ("frame", recipe.frame),
        ("resize", recipe.resize),
        ("rounding", inputs.get("rounding") or None),
    ):
        if numbers is not None and not (
            len(numbers) == len(size) and all(type(n) is int and n > 0 for n in numbers)
        ):
            raise ValueError(f"{key} needs {len(size)} numbers of voxels, got {numbers}")
    if any(not 0 <= index < asked.num_outputs for pair in window.flip_label_pairs for index in pair):
        raise ValueError(
            f"flip_label_pairs must name channels of {asked.num_outputs}, got {window.flip_label_pairs}"
        )


def _numbers(content: Any) -> tuple[dict[str, float], ...]:
    return tuple({str(name): float(value) for name, value in channel.items()} for channel in content)
