"""What a MONAI bundle says of itself: metadata.json and README."""

from importlib.metadata import version
from typing import Any

import medconv
from medconv.features.export.metadata import Metadata
from medconv.inference.load import LoadedModel

_SCHEMA = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
)
# What `monai.bundle run` needs beside MONAI, with lowest versions.
_NEEDS = {"nibabel": "5.2.0", "pytorch-ignite": "0.5.0", "fire": "0.5.0"}


def bundle_metadata(model: LoadedModel, metadata: Metadata, name: str) -> dict[str, Any]:
    """As the schema asks for."""
    inputs = metadata["inputs"]
    outputs = metadata["outputs"]
    dataset = metadata["training"]["dataset"]
    sizes = _spatial_shape(metadata)
    dice = metadata["validation"]["scores"]["dice"]
    return {
        "schema": _SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": "exported"},
        "monai_version": metadata["versions"]["monai"],
        "pytorch_version": metadata["versions"]["torch"].partition("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": _NEEDS,
        "name": name,
        "task": f"segmentation of {', '.join(outputs['targets']['names'])}",
        "description": f"Trained by medconv {medconv.__version__} on {dataset}; see docs/README.md",
        "authors": "not stated",
        "copyright": "not stated",
        "data_source": str(dataset),
        "data_type": "nibabel",
        "image_classes": ", ".join(inputs["channels"]),
        "label_classes": model.targets.description,
        "pred_classes": ", ".join(outputs["channels"]),
        "eval_metrics": {} if dice is None else {"mean_dice": dice},
        "network_data_format": {
            "inputs": {"image": _data_format("magnitude", sizes, inputs["channels"])},
            "outputs": {"pred": _data_format("segmentation", sizes, outputs["channels"])},
        },
    }


def _spatial_shape(metadata: Metadata) -> list[Any]:
    """Per axis the size in voxels, or an expression of `n` where it is open."""
    axes = zip(
        metadata["inputs"]["divisor"],
        metadata["inputs"]["dynamic"]["spatial"],
        metadata["windows"]["patch_size"],
        strict=True,
    )
    return [f"{divisor} * n" if is_dynamic else size for divisor, is_dynamic, size in axes]


def _data_format(format: str, sizes: list[Any], channels: list[str]) -> dict[str, Any]:
    return {
        "type": "image",
        "format": format,
        "dtype": "float32",
        "is_patch_data": True,
        "spatial_shape": sizes,
        "value_range": [],
        "num_channels": len(channels),
        "channel_def": dict(enumerate(channels)),
    }


def readme(model: LoadedModel, name: str) -> str:
    assert model.path is not None
    differs = [
        "Resampling: MONAI uses the exact spacing; medconv adjusts it slightly, to get a whole number "
        "of voxels between the image's edges. No difference if the image has the network's spacing already.",
        "MONAI resamples the logits to the image's grid by cubic splines, medconv by linear interpolation.",
    ]
    if model.window.mirror_axes:
        flips = f"averages over flips along axes {list(model.window.mirror_axes)}"
        differs.append(f"MONAI uses no test-time augmentation; medconv {flips}.")
    files = "files `CASE.nii.gz`"
    if len(model.modalities) > 1:
        files = "files `CASE_0000.nii.gz`, `CASE_0001.nii.gz`, ..."
    lines = "\n".join(f"- {line}" for line in differs)
    return f"""# {name}

Segmentation of {", ".join(model.targets.names)} from {", ".join(model.modalities)}; `models/model.ts.json`
describes the network's input and its validation. Put {files} into `images/` and run in the bundle's folder:

```bash
python -m monai.bundle run --config_file configs/inference.json --meta_file configs/metadata.json \\
    --bundle_root . --dataset_dir images --output_dir predictions
```

This needs {", ".join(_NEEDS)}. A TorchScript file and a MONAI config are programs: run them only if you
trust their source.

Differences from `medconv predict --checkpoint {model.path.name}`, by which the network was validated:

{lines}

`medconv predict` does not read `models/model.ts`; it reads the checkpoint.
"""
