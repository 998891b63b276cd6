"""plans.json and dataset.json of nnU-Net v2 for a network of ours, and what nnU-Net cannot express.

Source: the keys that nnU-Net 2.8.1 reads, https://github.com/MIC-DKFZ/nnUNet.
"""

from collections.abc import Sequence
from typing import Any

import medconv
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.features.nnunet.network import NnUNet
from medconv.inference.load import LoadedModel
from medconv.targets import Targets
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets

Content = dict[str, Any]
PLANS_NAME = "nnUNetPlans"
_NORMALISATIONS = {
    "zscore": "ZScoreNormalization",
    "zscore_nonzero": "ZScoreNormalization",  # with use_mask_for_norm
    "ct": "CTNormalization",
    "dataset": "CTNormalization",  # with limits that no voxel reaches
    "rescale": "RescaleTo01Normalization",
    "none": "NoNormalization",
}
_LIMIT = 3.4e38  # about the largest number in float32
_READERS = {  # by convention: axes as right, anterior, superior, or as stored
    None: "NibabelIOWithReorient",
    "nnunet_ras": "NibabelIOWithReorient",
    "nnunet": "SimpleITKIO",
}
_SPLINE_ORDERS = {"data": 3, "seg": 1, "probabilities": 1}


def check_preprocessing(model: LoadedModel) -> None:
    """Raises: ValueError: nnU-Net cannot prepare images, or read outputs, as this network needs."""
    preprocessing = model.preprocessing
    needed = ""
    if not model.targets.answers_classes:
        needed = f"segmentation, this network has {model.targets.kind} targets"
    elif preprocessing.image_dims == 2:
        needed = "volumes, this network takes 2D images; data.spatial_dims=2 on volumes would fit"
    elif preprocessing.resize is not None:
        needed = "a spacing in mm, this network has data.resize; data.spacing_mm would fit"
    elif model.source_spacing_mm is not None:
        needed = "images whose headers have the spacing, which data.source_spacing_mm replaced in training"
    elif not _tells_regions(model.targets):
        needed = "regions of which one has several label values; without data.regions it would fit"
    if needed:
        raise ValueError(f"{model.path}: the format nnunet is for {needed}")


def _tells_regions(targets: Targets) -> bool:
    """Whether nnU-Net sees whether outputs exclude each other: by the label values of each name."""
    if isinstance(targets, RegionTargets):
        return any(len(values) > 1 for values in targets.values)
    return isinstance(targets, LabelMapTargets)


def configuration_name(model: LoadedModel) -> str:
    return "2d" if model.preprocessing.spatial_dims == 2 else "3d_fullres"


def stored_axes(model: LoadedModel) -> list[int]:
    """The axis of the file, x being 0, of each axis of nnU-Net's arrays.

    A 2D network takes slices across the first.
    """
    axes = [2, 1, 0]
    slice_axis = model.preprocessing.slice_axis
    if slice_axis is None:
        return axes
    axes.remove(slice_axis)
    return [slice_axis, *axes]


def plans(model: LoadedModel, network: NnUNet, dataset_name: str) -> Content:
    """The content of plans.json."""
    preprocessing = model.preprocessing
    # nnU-Net's arrays are stored z, y, x.
    forward = [2 - axis for axis in stored_axes(model)]
    patch_size = list(model.window.patch_size[::-1])
    spacing_mm = list(preprocessing.spacing_mm[::-1])
    # Of the dataset, for planning alone; the checkpoint does not have them.
    is_2d = preprocessing.slice_axis is not None
    median_shape = [max(patch_size), *patch_size] if is_2d else patch_size
    median_spacing = [max(spacing_mm), *spacing_mm] if is_2d else spacing_mm
    return {
        "dataset_name": dataset_name,
        "plans_name": PLANS_NAME,
        "original_median_spacing_after_transp": median_spacing,
        "original_median_shape_after_transp": median_shape,
        "image_reader_writer": _READERS[preprocessing.convention],
        "transpose_forward": forward,
        "transpose_backward": [forward.index(axis) for axis in range(3)],
        "experiment_planner_used": "ExperimentPlanner",
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": _intensities(preprocessing),
        "configurations": {configuration_name(model): _configuration(model, network, patch_size, spacing_mm)},
        # nnU-Net ignores it; `import-nnunet` reads it.
        "medconv": {"version": medconv.__version__, "convention": preprocessing.convention},
    }


def _configuration(
    model: LoadedModel, network: NnUNet, patch_size: Sequence[int], spacing_mm: Sequence[float]
) -> Content:
    """Args: patch_size, spacing_mm: in nnU-Net's axes."""
    normalisation = model.preprocessing.normalisation
    return {
        "data_identifier": f"{PLANS_NAME}_{configuration_name(model)}",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": model.window.batch_size,
        "patch_size": list(patch_size),
        "median_image_size_in_voxels": list(patch_size),
        "spacing": list(spacing_mm),
        "normalization_schemes": [_NORMALISATIONS[name] for name in normalisation],
        "use_mask_for_norm": [name == "zscore_nonzero" for name in normalisation],
        **_resampling(model.preprocessing.convention),
        "architecture": network.architecture,
        "batch_dice": False,
    }


def _resampling(convention: str | None) -> Content:
    """Our own convention interpolates along all axes; nnU-Net's takes the nearest of thick slices."""
    resampling: Content = {}
    for kind, order in _SPLINE_ORDERS.items():
        resampling[f"resampling_fn_{kind}"] = "resample_data_or_seg_to_shape"
        resampling[f"resampling_fn_{kind}_kwargs"] = {
            "is_seg": kind == "seg",
            "order": order,
            "order_z": 0,
            "force_separate_z": False if convention is None else None,
        }
    return resampling


def _intensities(preprocessing: PreprocessingConfig) -> Content:
    intensities = {}
    for channel, name in enumerate(preprocessing.normalisation):
        measured = {key: float(value) for key, value in preprocessing.intensities[channel].items()}
        if name == "dataset":
            measured |= {"percentile_00_5": -_LIMIT, "percentile_99_5": _LIMIT}
        intensities[str(channel)] = measured
    return intensities


def dataset_json(model: LoadedModel, dataset_name: str, num_cases: int) -> Content:
    """The content of dataset.json. Unlabelled voxels have no value here: predictions have none.

    Args: num_cases: that the network was trained on.
    """
    targets = model.targets
    labels: Content = {"background": 0}
    content: Content = {
        "name": dataset_name,
        "channel_names": {str(channel): name for channel, name in enumerate(model.modalities)},
        "labels": labels,
        "numTraining": num_cases,
        "file_ending": ".nii.gz",
    }
    if isinstance(targets, RegionTargets):
        for name, values in targets.by_name.items():
            labels[name] = list(values)
        content["regions_class_order"] = list(targets.order)
        return content
    labels |= {name: value for value, name in enumerate(targets.names, start=1)}
    return content
