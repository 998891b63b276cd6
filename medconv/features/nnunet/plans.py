"""What a model folder of nnU-Net v2 says of its data and network, in medconv's axes and words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from medconv.config import Node
from medconv.data.case import Dataset
from medconv.data.datasets.common import read_json
from medconv.data.datasets.dataset_json import names_by_number
from medconv.data.preprocessing.fingerprint import INTENSITIES
from medconv.features.nnunet.network import NnUNet
from medconv.targets.parse import parse_labels
from medconv.utils import checkpoint_io
from medconv.utils.errors import explained

DAMAGED = (LookupError, TypeError, AttributeError, ArithmeticError)
# Intensities of 8-bit colours, so that normalisation by the dataset maps them to 0 to 1.
_RGB = {"percentile_00_5": 0.0, "percentile_99_5": 255.0, "mean": 0.0, "std": 255.0}
_NORMALISATIONS = {
    "ZScoreNormalization": "zscore",
    "CTNormalization": "ct",
    "NoNormalization": "none",
    "RescaleTo01Normalization": "rescale",
    "RGBTo01Normalization": "dataset",  # with the numbers of _RGB
}
_CONVENTIONS = {  # of the class that reads images
    "SimpleITKIO": "nnunet",
    "NibabelIO": "nnunet",
    "SimpleITKIOWithReorient": "nnunet_ras",
    "NibabelIOWithReorient": "nnunet_ras",
}
# Of the splines that resample, in the plane.
_SPLINE_ORDERS = {"resampling_fn_data": 3, "resampling_fn_probabilities": 1}
Value = TypeVar("Value")
Content = Mapping[str, Any]


@dataclass(frozen=True)
class NnUNetModel:
    """A configuration of a trained nnU-Net v2 model.

    Args:
        name: of the configuration, such as 3d_fullres.
        num_cases: training cases.
        network: as in the plans, in nnU-Net's axes; `ours` turns them.
        axes: nnU-Net's spatial axis that becomes each of ours: its arrays are stored Z, Y, X, and transposed.
        slice_axis: across the slices that a 2D network takes from volumes, else None.
        spacing_mm: as in the plans, in nnU-Net's axes.
        patch_size: as in the plans, in nnU-Net's axes.
        normalisation: of each channel.
        intensities: of each channel.
        convention: how images are read and resampled; None: as medconv does, not nnU-Net.
        spacing_range_mm: smallest and largest of the training cases, in our axes; empty: not known.
    """

    name: str
    dataset: Dataset
    num_cases: int
    network: NnUNet
    axes: tuple[int, ...]
    slice_axis: int | None
    spacing_mm: tuple[float, ...]
    patch_size: tuple[int, ...]
    batch_size: int
    normalisation: tuple[str, ...]
    intensities: tuple[dict[str, float], ...]
    convention: str | None
    spacing_range_mm: tuple[tuple[float, float], ...]

    def ours(self, values: Sequence[Value]) -> tuple[Value, ...]:
        """One value per axis of nnU-Net's network, in the order of ours."""
        return ours(values, self.axes)

    def settings(self, mirror_axes: Sequence[int]) -> Node:
        """The keys of a config that trains and predicts as nnU-Net does. Args: mirror_axes: nnU-Net's."""
        network = self.network
        mirrored = sorted(self.axes.index(axis) for axis in mirror_axes)
        return {
            "data": {
                "spatial_dims": len(self.axes),
                "slice_axis": self.slice_axis,
                "spacing_mm": list(self.ours(self.spacing_mm)),
                "patch_size": list(self.ours(self.patch_size)),
                "batch_size": self.batch_size,
                "normalisation": list(self.normalisation),
                "intensities": list(self.intensities),
                "convention": self.convention,
            },
            "plan": plan_keys(network, self.axes),
            "model": network.arguments,
            "augmentation": {"mirror_axes": mirrored},
            "task": {"mirror_axes": mirrored},
        }


def ours(values: Sequence[Value], axes: Sequence[int]) -> tuple[Value, ...]:
    """One value per axis of nnU-Net's network, in the order of ours. Args: axes: as of `NnUNetModel`."""
    return tuple(values[axis] for axis in axes)


def plan_keys(network: NnUNet, axes: Sequence[int]) -> Node:
    """The keys of `plan` that make this network. Args: axes: as of `NnUNetModel`."""
    return {
        "strides": [list(ours(step, axes)) for step in network.strides[1:]],
        "kernel_sizes": [list(ours(kernel, axes)) for kernel in network.kernel_sizes],
        "channels": list(network.channels),
    }


@dataclass(frozen=True)
class TrainedFold:
    """What a checkpoint of nnU-Net holds. Args: mirror_axes: nnU-Net's, of test-time augmentation."""

    path: Path
    configuration: str
    trainer_name: str
    mirror_axes: list[int]
    weights: dict[str, Any]


def read_checkpoint(path: Path) -> TrainedFold:
    """The checkpoint of a fold; no code in it is run.

    Raises:
        ValueError: it is missing or damaged, or holds more than tensors and plain values.
    """
    content = checkpoint_io.unpickled(path, inert=True)
    with explained(f"{path}: not a checkpoint of nnU-Net v2", *DAMAGED):
        return TrainedFold(
            path=path,
            configuration=str(content["init_args"]["configuration"]),
            trainer_name=str(content["trainer_name"]),
            mirror_axes=[int(axis) for axis in content.get("inference_allowed_mirroring_axes") or ()],
            weights=dict(content["network_weights"]),
        )


def read(folder: Path, name: str) -> NnUNetModel:
    """The configuration `name` of a model folder.

    Raises:
        ValueError: plans.json or dataset.json is missing or damaged, or holds what is not supported.
    """
    path = folder / "plans.json"
    plans = read_json(path)
    meta = read_json(folder / "dataset.json")
    with explained(f"{path}: configuration {name} is damaged", *DAMAGED), explained(f"{path}", ValueError):
        configuration = _inherited(plans["configurations"], name)
        _check(plans, configuration)
        return _model(folder, name, plans, configuration, meta)


def _model(folder: Path, name: str, plans: Content, configuration: Content, meta: Content) -> NnUNetModel:
    """Args: meta: dataset.json."""
    class_names, targets = parse_labels(meta, folder / "dataset.json")
    channels = names_by_number(meta.get("channel_names"), folder / "dataset.json", "channel_names")
    dims = len(configuration["patch_size"])
    spacings = _case_spacings(folder)
    takes_slices = dims == 2 and not _are_pictures(plans)
    return NnUNetModel(
        name=name,
        dataset=Dataset(str(plans["dataset_name"]), (), class_names, channels, targets=targets),
        num_cases=len(spacings) or int(meta.get("numTraining", 0)),
        network=NnUNet.of(configuration),
        axes=axes_of(plans, dims),
        slice_axis=_stored_axes(plans, dims)[0] if takes_slices else None,
        spacing_mm=tuple(map(float, configuration["spacing"])),
        patch_size=tuple(map(int, configuration["patch_size"])),
        batch_size=int(configuration["batch_size"]),
        normalisation=normalisations(configuration),
        intensities=_intensities(plans, configuration),
        convention=_convention(plans),
        spacing_range_mm=tuple((min(mm), max(mm)) for mm in zip(*spacings, strict=True)),
    )


def axes_of(plans: Content, dims: int) -> tuple[int, ...]:
    """nnU-Net's spatial axis that becomes each of ours. Raises: ValueError: as `_stored_axes`."""
    network_axes = _stored_axes(plans, dims)[3 - dims :]  # a 2D network has no first axis
    return tuple(sorted(range(dims), key=network_axes.__getitem__))


def _stored_axes(plans: Content, dims: int) -> list[int]:
    """The axis of the file, x being 0, of each axis of nnU-Net's transposed arrays.

    Raises: ValueError: the plans do not permute three axes.
    """
    stored_axes = [2 - int(axis) for axis in plans["transpose_forward"]]
    if sorted(stored_axes) != [0, 1, 2] or dims not in (2, 3):
        raise ValueError(f"transpose_forward={plans['transpose_forward']} with {dims} axes is not supported")
    return stored_axes


def _case_spacings(folder: Path) -> list[tuple[float, ...]]:
    """The spacing in mm of each training case as stored (x, y, z); empty if nnU-Net's fingerprint is gone."""
    path = folder / "dataset_fingerprint.json"
    spacings = read_json(path)["spacings"] if path.is_file() else []
    return [tuple(map(float, reversed(spacing))) for spacing in spacings]


def _are_pictures(plans: Content) -> bool:
    """Whether the cases are single slices."""
    return int(plans["original_median_shape_after_transp"][0]) == 1


def normalisations(configuration: Content) -> tuple[str, ...]:
    """The normalisation of each channel, in medconv's words. Raises: ValueError: one that it lacks."""
    schemes = configuration["normalization_schemes"]
    masked = configuration["use_mask_for_norm"]
    per_channel = [masked] * len(schemes) if isinstance(masked, bool) else masked
    return tuple(_normalisation(*channel) for channel in zip(schemes, per_channel, strict=True))


def _normalisation(scheme: str, masked: bool) -> str:
    if scheme not in _NORMALISATIONS:
        raise ValueError(f"normalization_schemes: {scheme} is none of {', '.join(_NORMALISATIONS)}")
    name = _NORMALISATIONS[scheme]
    return "zscore_nonzero" if masked and name == "zscore" else name


def _intensities(plans: Content, configuration: Content) -> tuple[dict[str, float], ...]:
    """Statistics of each channel's values in the foreground, as nnU-Net measured them."""
    measured = plans["foreground_intensity_properties_per_channel"]
    channels = []
    for channel, scheme in enumerate(configuration["normalization_schemes"]):
        if scheme == "RGBTo01Normalization":
            channels.append(dict(_RGB))
        else:
            channels.append({key: float(measured[str(channel)][key]) for key in INTENSITIES})
    return tuple(channels)


def _inherited(configurations: Content, name: str) -> dict[str, Any]:
    """A configuration with what it inherits.

    Raises:
        KeyError: no configuration has the name, or the one that it inherits from.
        ValueError: it inherits from itself.
    """
    configuration = dict(configurations[name])
    names = {name}
    while "inherits_from" in configuration:
        parent = configuration.pop("inherits_from")
        if parent is None:
            break
        if parent in names:
            raise ValueError(f"configuration {name} inherits from itself")
        names.add(parent)
        configuration = {**configurations[parent], **configuration}
    return configuration


def _convention(plans: Content) -> str | None:
    """How images are read and resampled; None: as medconv does, in plans that `medconv export` wrote."""
    if "medconv" in plans and plans["medconv"]["convention"] is None:
        return None
    return _CONVENTIONS[plans["image_reader_writer"]]


def _check(plans: Content, configuration: Content) -> None:
    """Raises: ValueError: the plans ask for what medconv cannot do as nnU-Net does."""
    reader = plans["image_reader_writer"]
    if reader not in _CONVENTIONS:
        raise ValueError(f"image_reader_writer={reader} is not supported, expected {', '.join(_CONVENTIONS)}")
    if configuration.get("previous_stage"):
        raise ValueError(f"a cascade, after {configuration['previous_stage']}, is not supported")
    expected: dict[str, Any] = {"preprocessor_name": "DefaultPreprocessor"}
    for key, order in _SPLINE_ORDERS.items():
        expected[key] = "resample_data_or_seg_to_shape"
        expected[f"{key}_kwargs"] = {
            "is_seg": False,
            "order": order,
            "order_z": 0,
            # medconv's own convention interpolates across thick slices, too
            "force_separate_z": False if _convention(plans) is None else None,
        }
    for key, value in expected.items():
        if configuration[key] != value:
            raise ValueError(f"{key}={configuration[key]} is not supported, expected {value}")
