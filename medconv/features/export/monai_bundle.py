"""A MONAI bundle: a folder that MONAI can run without medconv, with MONAI's transforms.

The network is a TorchScript file. Where MONAI's transforms differ from `data.preprocessing`, the bundle's
README says so.
Source: https://docs.monai.io/en/latest/mb_specification.html; the schema is the one of 2024-07-25.
"""

import json
from pathlib import Path
from typing import Any

from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.features.export.bundle_documents import bundle_metadata, readme
from medconv.features.export.formats import TORCHSCRIPT
from medconv.features.export.job import Format, Job, write_metadata
from medconv.features.export.metadata import Metadata
from medconv.inference.load import LoadedModel
from medconv.inference.sliding_window import SlidingWindow
from medconv.targets import Targets
from medconv.targets.regions import RegionTargets

# Where MONAI's tools look for a TorchScript file.
MODEL = Path("models/model.ts")
_KEY = {"keys": "image"}
# Cubic splines, and the outer edges of the image keep their places, as in medconv.
_SPLINES = {"mode": 3, "padding_mode": "nearest", "scale_extent": True, "align_corners": True}
Node = dict[str, Any]


class Bundle(Format):
    """The format `bundle` of `medconv export`."""

    is_folder = True

    def check(self, model: LoadedModel, output: Path) -> None:
        _check_transforms(model)

    def write(self, path: Path, job: Job) -> None:
        file = path / MODEL
        file.parent.mkdir(parents=True)
        metadata = TORCHSCRIPT.write(file, job)
        write_metadata(metadata, file)
        _write_documents(path, job.model, metadata, job.name)

    def notes(self, model: LoadedModel, output: Path) -> list[str]:
        return [f"{output}, a MONAI bundle; docs/README.md in it has the command"]


BUNDLE = Bundle()


def _check_transforms(model: LoadedModel) -> None:
    """Raises: ValueError: MONAI has no transforms for what this network was trained on."""
    preprocessing = model.preprocessing
    needed = ""
    if not model.targets.answers_classes:
        needed = f"segmentation, this network has {model.targets.kind} targets"
    elif preprocessing.image_dims == 2:
        needed = "volumes, this network takes 2D images"
    elif model.source_spacing_mm is not None:
        needed = "images whose headers have the spacing, which data.source_spacing_mm replaced in training"
    elif preprocessing.convention is not None:
        needed = f"axes that are turned, this network has data.convention={preprocessing.convention}"
    elif "zscore_nonzero" in preprocessing.normalisation:
        needed = "whole images, this network's data.normalisation is zscore_nonzero"
    if needed:
        raise ValueError(f"{model.path}: a bundle is for {needed}; take another format")


def _write_documents(folder: Path, model: LoadedModel, metadata: Metadata, name: str) -> None:
    """Write everything but the network, which is at `MODEL` already.

    Args:
        folder: an existing folder.
        metadata: of the network.
        name: of the bundle.
    """
    configs = folder / "configs"
    configs.mkdir()
    _write_json(configs / "inference.json", inference(model))
    _write_json(configs / "metadata.json", bundle_metadata(model, metadata, name))
    docs = folder / "docs"
    docs.mkdir()
    (docs / "README.md").write_text(readme(model, name), encoding="utf-8")


def _write_json(path: Path, content: Node) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def inference(model: LoadedModel) -> Node:
    """The config that `monai.bundle run` runs."""
    dataset = _node("Dataset", data="$[{'image': i} for i in @datalist]", transform="@preprocessing")
    evaluator = _node(
        "SupervisedEvaluator",
        device="@device",
        network="@network",
        inferer="@inferer",
        postprocessing="@postprocessing",
        val_data_loader="@dataloader",
        val_handlers="@handlers",
    )
    return {
        "imports": ["$import glob", "$import os", "$import numpy", "$import torch"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/predictions'",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "datalist": _datalist(len(model.modalities)),
        "network_def": f"$torch.jit.load(@bundle_root + '/{MODEL.as_posix()}', map_location=@device)",
        "network": "$@network_def.to(@device)",
        "preprocessing": _node("Compose", transforms=_preprocessing(model.preprocessing)),
        "dataset": dataset,
        "dataloader": _node("DataLoader", dataset="@dataset", batch_size=1, shuffle=False, num_workers=0),
        "inferer": _inferer(model.window),
        "postprocessing": _node("Compose", transforms=_postprocessing(model.targets)),
        "handlers": [],
        "evaluator": evaluator,
        "initialize": ["$os.makedirs(@output_dir, exist_ok=True)"],
        "run": ["$@evaluator.run()"],
    }


def _node(target: str, **arguments: Any) -> Node:
    return {"_target_": target, **arguments}


def _inferer(window: SlidingWindow) -> Node:
    node = _node("SlidingWindowInferer")
    # A 2D network goes through a volume slice by slice.
    if window.slice_axis is not None:
        node = _node("SliceInferer", spatial_dim=window.slice_axis)
    return {
        **node,
        "roi_size": list(window.patch_size),
        "sw_batch_size": window.batch_size,
        "overlap": window.overlap,
        "mode": "gaussian",
    }


def _datalist(channels: int) -> str:
    """An expression for the cases: one file each, or CASE_0000, CASE_0001, ... for the channels."""
    if channels == 1:
        return "$sorted(glob.glob(@dataset_dir + '/*.nii*'))"
    names = f"[f.replace('_0000.nii', '_%04d.nii' % c) for c in range({channels})]"
    return f"$[{names} for f in sorted(glob.glob(@dataset_dir + '/*_0000.nii*'))]"


def _preprocessing(preprocessing: PreprocessingConfig) -> list[Node]:
    spacing_mm = list(preprocessing.spacing_mm)
    if preprocessing.slice_axis is not None:
        # For MONAI, -1 is the image's own spacing.
        spacing_mm.insert(preprocessing.slice_axis, -1.0)
    return [
        _node("LoadImaged", **_KEY, ensure_channel_first=True),
        _node("Orientationd", **_KEY, axcodes="RAS"),
        _node("CropForegroundd", **_KEY, source_key="image", select_fn="$lambda x: x != 0"),
        *_normalisation(preprocessing),
        _node("Spacingd", **_KEY, pixdim=spacing_mm, **_SPLINES),
    ]


def _normalisation(preprocessing: PreprocessingConfig) -> list[Node]:
    names = set(preprocessing.normalisation)
    if names == {"none"}:
        return []
    if names == {"zscore"}:
        return [_node("NormalizeIntensityd", **_KEY, channel_wise=True)]
    if names == {"rescale"}:
        return [_node("ScaleIntensityd", **_KEY, minv=0.0, maxv=1.0, channel_wise=True)]
    channels = ", ".join(_channel(preprocessing, index) for index in range(len(preprocessing.normalisation)))
    return [_node("Lambdad", **_KEY, func=f"$lambda x: torch.cat([{channels}])")]


def _channel(preprocessing: PreprocessingConfig, index: int) -> str:
    """The normalisation of one channel, as an expression of `x`."""
    x = f"x[{index}:{index + 1}]"
    name = preprocessing.normalisation[index]
    if name == "zscore":
        return f"({x} - {x}.mean()) / {x}.std(correction=0).clamp(min=1e-8)"
    if name == "rescale":
        return f"({x} - {x}.min()) / ({x}.max() - {x}.min()).clamp(min=1e-8)"
    if name == "none":
        return x
    intensities = preprocessing.intensities[index]
    mean = float(intensities["mean"])
    std = max(float(intensities["std"]), 1e-8)
    if name == "dataset":
        return f"({x} - {mean!r}) / {std!r}"
    low = float(intensities["percentile_00_5"])
    high = float(intensities["percentile_99_5"])
    return f"({x}.clamp({low!r}, {high!r}) - {mean!r}) / {std!r}"


def _postprocessing(targets: Targets) -> list[Node]:
    """From logits on the prepared grid to a saved label map on the image's."""
    return [
        _node(
            "Invertd",
            keys="pred",
            transform="@preprocessing",
            orig_keys="image",
            nearest_interp=False,
            to_tensor=True,
        ),
        _decode(targets),
        _node(
            "SaveImaged",
            keys="pred",
            output_dir="@output_dir",
            output_postfix="",
            separate_folder=False,
            resample=False,
            output_dtype="$numpy.int16",
        ),
    ]


def _decode(targets: Targets) -> Node:
    if not isinstance(targets, RegionTargets):
        return _node("AsDiscreted", keys="pred", argmax=True)
    label = "0"
    # Later regions are drawn over earlier ones.
    for channel, value in enumerate(targets.order):
        label = f"torch.where(x[{channel}:{channel + 1}] > 0, {value}, {label})"
    return _node("Lambdad", keys="pred", func=f"$lambda x: {label}")
