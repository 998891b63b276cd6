"""Labels of several raters, or that are probabilities: as they are read, prepared and compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medconv.data.case import Case, Dataset, Grid, Relabel
from medconv.data.case_files import label_of, label_on
from medconv.data.datasets.patterns import labels_of
from medconv.data.io.grids import on_grid, to_canonical
from medconv.data.io.label_values import names_of, relabel_by_name, relabels
from medconv.data.io.raster import is_picture
from medconv.data.loading.patch import Sample
from medconv.data.preprocessing.preprocess import CropInfo, PreprocessingConfig, resampled_shape
from medconv.data.preprocessing.resampling import LINEAR, nearest, zoom
from medconv.features.raters.probabilities import read_probabilities
from medconv.metrics.consensus import most_probable, shares
from medconv.targets.base import Targets
from medconv.targets.label_map import LabelMapTargets
from medconv.utils.errors import Argument, ArgumentError
from medconv.utils.logging import some


@dataclass(frozen=True)
class RatedLabel:
    """A `data.case.SoftLabel`: the probability of each foreground class.

    Args:
        num_classes: with the background.
        further_files: label files of others than `Case.label`; None: this rater has none of this case.
        further_relabels: as `Case.relabel`, for each of these files.
        are_probabilities: whether the files hold the probabilities, not label maps.
    """

    num_classes: int
    further_files: tuple[Path | None, ...] = ()
    further_relabels: tuple[Relabel | None, ...] = ()
    are_probabilities: bool = False

    def declared(self, case: Case) -> list[Any]:
        declared: list[Any] = [self.are_probabilities]
        if any(relabel != case.relabel for relabel in self.further_relabels):
            declared.append(self.further_relabels)
        return declared

    def label_map(self, case: Case) -> tuple[np.ndarray, Grid]:
        """The most probable class. Shape: (X, Y, Z) int16."""
        probabilities, grid = self.probabilities(case)
        return most_probable(probabilities), grid

    def probabilities(self, case: Case) -> tuple[np.ndarray, Grid]:
        """The probability of each foreground class: the mean over the raters.

        Shape: (classes, X, Y, Z) float32, on the grid of the first rater's file.

        Raises:
            ValueError: as `label_of` or `read_probabilities`; raters whose grids differ.
        """
        assert case.label is not None
        if self.are_probabilities:
            probabilities, grid = read_probabilities(case.label, self.num_classes)
            return probabilities, grid.with_spacing_mm(case.source_spacing_mm)
        label_maps, grid = self.label_maps(case)
        return shares(
            [label_map for label_map in label_maps if label_map is not None], self.num_classes
        ), grid

    def label_maps(self, case: Case) -> tuple[list[np.ndarray | None], Grid]:
        """The label map of each rater on the grid of the first one; None: this rater has none of this case.

        Shape: each (X, Y, Z) int16.

        Raises:
            ValueError: as `label_of`; raters whose grids or label values differ from those of the dataset.
        """
        assert case.label is not None
        first, grid = label_of(replace(case, soft_label=None))
        label_maps: list[np.ndarray | None] = [first]
        for path, relabel in zip(self.further_files, self.further_relabels, strict=True):
            if path is None:
                label_maps.append(None)
                continue
            further, rater_grid = label_of(replace(case, label=path, relabel=relabel, soft_label=None))
            label_maps.append(on_grid(further, case.label, grid, path, rater_grid))
        for path, label_map in zip(case.label_files, label_maps, strict=True):
            highest = self.num_classes - 1
            if label_map is not None and label_map.max() > highest:
                raise ValueError(
                    f"{path}: label value {label_map.max()} is not declared, expected 0 to {highest}"
                )
        return label_maps, grid


def rated(case: Case) -> RatedLabel:
    """The label of a case of `with_soft_labels`."""
    assert isinstance(case.soft_label, RatedLabel)
    return case.soft_label


def probabilities_on(case: Case, grid: Grid) -> np.ndarray:
    """`probabilities` on the grid of the case's image. Shape: (classes, X, Y, Z) float32."""
    assert case.label is not None
    probabilities, label_grid = rated(case).probabilities(case)
    # Each class has the grid of the label file
    on_image = [on_grid(of_class, case.images[0], grid, case.label, label_grid) for of_class in probabilities]
    return np.stack(on_image)


def rater_labels_on(case: Case, grid: Grid) -> list[np.ndarray | None]:
    """`label_maps` on the grid of the case's image; empty where the files hold probabilities."""
    assert case.label is not None
    if rated(case).are_probabilities:
        return []
    label_maps, label_grid = rated(case).label_maps(case)
    on_image: list[np.ndarray | None] = []
    for label_map in label_maps:
        if label_map is not None:
            label_map = on_grid(label_map, case.images[0], grid, case.label, label_grid)
        on_image.append(label_map)
    return on_image


def settings(targets: Targets) -> None:
    """As `Family.labels`: cases say what their labels depend on, `RatedLabel.declared`."""


def prepared(
    targets: Targets, case: Case, image: np.ndarray, crop_info: CropInfo, config: PreprocessingConfig
) -> tuple[np.ndarray, np.ndarray]:
    """As `Family.labels`: the most probable classes, and the probabilities, (classes, *spatial) float16."""
    soft_label = preprocess_probabilities(probabilities_on(case, crop_info.grid), crop_info, config)
    label = most_probable(soft_label.astype(np.float32))
    return label.astype(np.uint8 if rated(case).num_classes <= 256 else np.int16), soft_label


def preprocess_probabilities(
    probabilities: np.ndarray, crop_info: CropInfo, config: PreprocessingConfig
) -> np.ndarray:
    """Native probabilities of classes on the grid of their prepared image, by linear interpolation.

    Shape: (classes, X, Y, Z) -> (classes, *spatial) float16.
    """
    canonical, spacing_mm = to_canonical(probabilities, crop_info.grid, config.reorients)
    cropped = canonical[:, *crop_info.slices]
    target_mm = config.target_mm(spacing_mm)
    shape = resampled_shape(cropped.shape[1:], spacing_mm, target_mm)
    axis = config.nearest_axis(spacing_mm, target_mm)
    if axis is not None:
        cropped = cropped.take(nearest(cropped.shape[1 + axis], shape[axis]), 1 + axis)
    resampled = np.stack([zoom(of_class, shape, order=LINEAR) for of_class in cropped])
    if config.image_dims == 2:
        resampled = resampled[..., 0]
    return np.ascontiguousarray(resampled, np.float16)


def reference(targets: Targets, case: Case, grid: Grid) -> Sample:
    """As `Family.labels`: the most probable classes, and a label map (X, Y, Z) of each rater, or None."""
    return {"reference": torch.from_numpy(label_on(case, grid)), "raters": rater_labels_on(case, grid)}


def labelled(
    dataset: Dataset, raters: str | Sequence[str] | None, soft_labels: bool | None, root: str | None
) -> list[Case]:
    """The cases with labels that are probabilities; see `SoftTargets.with_soft_labels`."""
    name = "soft_labels" if soft_labels else "raters"
    if type(dataset.targets) is not LabelMapTargets:
        raise ArgumentError(
            name, f" is for label maps of classes, but this dataset has {dataset.targets.kind} targets"
        )
    if dataset.targets.ignore is not None:
        raise ArgumentError(name, " cannot be combined with a value to ignore: ", Argument("ignore_label"))
    if raters is None:
        files: list[dict[str, Path]] = []
    elif soft_labels:
        raise ArgumentError("soft_labels", "=true takes one file for each case, without ", Argument("raters"))
    else:
        patterns = [raters] if isinstance(raters, str) else raters
        files = [_files_of_rater(Path(root or "") / pattern, dataset) for pattern in patterns]
    relabels_of_raters = [_relabels(of_rater, dataset) for of_rater in files]
    cases = []
    # A case without files of further raters is a case of one rater
    for case in dataset.cases:
        soft_label = RatedLabel(
            num_classes=len(dataset.class_names),
            further_files=tuple(of_rater.get(case.id) for of_rater in files),
            further_relabels=tuple(of_rater.get(case.id, case.relabel) for of_rater in relabels_of_raters),
            are_probabilities=bool(soft_labels),
        )
        cases.append(replace(case, soft_label=soft_label))
    return cases


def _relabels(files: Mapping[str, Path], dataset: Dataset) -> dict[str, Relabel | None]:
    """How the files of a rater are read, by case; empty: as the first rater's.

    Where there is one class, masks of each rater have a value of their own for it, such as 1 or 255.
    """
    ids = {case.id for case in dataset.cases}
    files = {case_id: path for case_id, path in files.items() if case_id in ids}
    if len(dataset.class_names) <= 2 and any(is_picture(path) for path in files.values()):
        return relabels(files, dataset.class_names)
    names = names_of(files)
    by_name = relabel_by_name(files, names, dataset.class_names) if names else {}
    return {case_id: by_name.get(case_id) for case_id in names}


def _files_of_rater(pattern: Path, dataset: Dataset) -> dict[str, Path]:
    """Case id to the label file of a rater. Raises: ArgumentError: no case has one."""
    files = labels_of(pattern, "raters", dataset.class_names)
    ids = {case.id for case in dataset.cases}
    if not ids & set(files):
        raise ArgumentError(
            "raters",
            f"={pattern}: no label of a case there; its ids are {some(sorted(files), 3)}, "
            f"those of the cases {some(sorted(ids), 3)}",
        )
    return files
