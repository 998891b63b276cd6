"""From the files of a case to its answer, a label map or image-level outputs, by one network or several."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medconv.data.case import Case, Grid
from medconv.data.case_files import image_of
from medconv.data.io.images import UNORIENTED, lacks_orientation
from medconv.data.per_case import source_spacing
from medconv.data.preprocessing.preprocess import CropInfo, preprocess, resampled_shape
from medconv.inference.exported import load as exported_load
from medconv.inference.forward import Forward, ImageLevelForward, Input, LabelMapForward
from medconv.inference.inputs import name_of
from medconv.inference.load import LoadedModel, load, with_window
from medconv.planning.topology import rounded_up
from medconv.utils.logging import size_text

log = logging.getLogger(__name__)
_SHEARED = 0.5  # degrees, as in training's checks
_FAR = 2.0  # a spacing this many times below or above that of all training cases causes a warning
Finish = Callable[[np.ndarray, Grid, Any], np.ndarray]


class Predictor:
    """One trained network, or the mean of several.

    Networks for label maps with the same preprocessing, such as the folds of one configuration: the mean of
    their logits, on the prepared grid. Where preprocessing differs, such as 2D and 3D, logits have no common
    grid and scale: the mean of the probabilities on the image's own grid, each member having the same weight.
    Image-level networks: the mean of their probabilities or numbers.
    Args:
        finish: post-processing of the label map, (label, grid, targets) -> label.
        batch_size: whole images in one forward pass; None: by their size.
        keeps_labels: each network's own label map is kept, too, for `LabelMapScores.agreement`.
    Raises: ValueError: members that were not trained for the same targets, channels or dimensions.
    Source: means over folds as in Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """

    def __init__(
        self,
        members: Sequence[LoadedModel],
        device: str = "cpu",
        finish: Finish | None = None,
        batch_size: int | None = None,
        keeps_labels: bool = False,
    ) -> None:
        self.members, self.finish = tuple(members), finish
        first = self.members[0]
        for other in self.members[1:]:
            _check_same(first, other)
        self.targets, self.class_names, self.modalities = first.targets, first.class_names, first.modalities
        self.forward: Forward = (
            LabelMapForward(members, device, keeps_labels)
            if self.targets.per_voxel
            else ImageLevelForward(members, device, batch_size)
        )

    @classmethod
    def load(
        cls,
        checkpoints: Sequence[Path | str],
        device: str = "cpu",
        trusted: Sequence[str] = (),
        mirror_axes: Sequence[int] | None = None,
        overlap: float | None = None,
        sw_batch_size: int | None = None,
        finish: Finish | None = None,
        models: Sequence[Path | str] = (),
        keeps_labels: bool = False,
        source_spacing_mm: Sequence[float] | None = None,
    ) -> Predictor:
        """From checkpoints and exported models; None keeps what each was validated with.

        Args: sw_batch_size: windows, or whole images, in one forward pass. source_spacing_mm: of the images,
            right, anterior, superior, in place of their headers'; without numbers, their headers'.
        Raises: ValueError: as `inference.load.load` and `inference.exported.load.load`, or no mean can be
            taken over them.
        """
        members = [load(Path(path), trusted, device, mirror_axes) for path in checkpoints]
        members += [exported_load.load(Path(path), device, mirror_axes) for path in models]
        members = [with_window(member, overlap, sw_batch_size) for member in members]
        if source_spacing_mm is not None:
            members = [replace(one, source_spacing_mm=list(source_spacing_mm) or None) for one in members]
        return cls(members, device, finish, sw_batch_size, keeps_labels)

    @property
    def train_cases(self) -> frozenset[str]:
        """Names of the cases that at least one of the networks was trained on."""
        return frozenset().union(*(member.train_cases for member in self.members))

    def __call__(self, *images: Path | str) -> np.ndarray:
        """The answer for a case, as `answer` gives it, from its files: one per channel, or one with all of
        them.

        Raises: ValueError: its files cannot be read, or do not fit the network.
        """
        paths = tuple(Path(path) for path in images)
        case_input = self.read(Case(name_of(paths[0]), paths))
        if case_input.warning:
            log.warning("%s: %s", paths[0], case_input.warning)
        return self.answer(self.scores([case_input])[0])

    def read(self, case: Case) -> Input:
        """Raises: ValueError: its files cannot be read, or do not fit the network."""
        stated = self.members[0].source_spacing_mm
        case = replace(case, source_spacing_mm=source_spacing(stated, case.id))
        image, grid = image_of(case)
        self._check(case.images[0], image, grid)
        try:
            prepared = [preprocess(image, grid, recipe) for recipe in self.forward.preprocessings]
        except ValueError as error:
            raise ValueError(f"{case.images[0]}: {error}") from error
        arrays, crops = [array for array, _ in prepared], [crop for _, crop in prepared]
        crop, places = crops[0], [replace(crop, nearest_axis=None) for crop in crops]
        if any(place != places[0] for place in places):  # only data.convention makes a difference
            raise ValueError(
                f"{case.images[0]}: networks of different data.convention have no common grid for this "
                "image; predict with each alone"
            )
        for member in self.members:
            array = arrays[self.forward.preprocessings.index(member.preprocessing)]
            _check_frame(case.images[0], member, array.shape[1:], crop)
        warnings = [self._spacing_warning(crop)]
        if grid.shear > _SHEARED:
            warnings.append(f"its axes are {grid.shear:.1f} degrees off a right angle; it is used as it is")
        if any(map(lacks_orientation, case.images)):
            warnings.append(UNORIENTED)
        if isinstance(stated, Mapping) and case.source_spacing_mm is None:
            warnings.append("its spacing is its header's; training stated that of some cases")
        return Input(case, arrays, crops, "; ".join(filter(None, warnings)) or None)

    @torch.inference_mode()
    def scores(self, inputs: Sequence[Input]) -> Sequence[Any]:
        """`LabelMapScores` or `ImageLevelScores` of each case. Raises: ValueError: the networks' outputs are
        not finite.
        """
        return self.forward(inputs)

    def answer(self, scores: Any) -> np.ndarray:
        """The label map after post-processing, (X, Y, Z) int16; or the image-level outputs, (names,) float32:
        class or label probabilities, or numbers.
        """
        answer = scores.answer()
        return answer if self.finish is None else self.finish(answer, scores.crop.grid, self.targets)

    def _check(self, path: Path, image: np.ndarray, grid: Grid) -> None:
        preprocessing = self.members[0].preprocessing
        if len(image) != len(self.modalities):
            names = f"{len(self.modalities)} channels ({', '.join(self.modalities)})"
            raise ValueError(f"{path}: the network was trained on {names}, found {len(image)}")
        if (grid.shape[2] == 1) != (preprocessing.image_dims == 2):
            dims = f"{preprocessing.spatial_dims}D" + (
                " on slices of volumes" if preprocessing.slice_axis is not None else ""
            )
            raise ValueError(f"{path}: the network is {dims}, the image has shape {grid.shape}")
        if not np.isfinite(image).all():
            raise ValueError(f"{path}: has voxels that are NaN or infinite, expected finite numbers")

    def _spacing_warning(self, crop: CropInfo) -> str | None:
        for member in self.members:
            spacing, ranges = crop.native_spacing_mm, member.spacing_range_mm
            if any(
                mm * _FAR < low or mm > _FAR * high for mm, (low, high) in zip(spacing, ranges, strict=False)
            ):
                trained = " x ".join(f"{low:.3g} to {high:.3g}" for low, high in ranges)
                here = size_text(spacing[: len(ranges)], 3)
                return (
                    f"its spacing, {here} mm (right, anterior, superior), is far from that of "
                    f"training, {trained} mm"
                )
        return None


def _check_frame(path: Path, member: LoadedModel, prepared: Sequence[int], crop: CropInfo) -> None:
    """Raises: ValueError: an image-level network takes images of one size, and this one has another; or it is
    a 2D image of another size than all training images, so that the network would see only its middle, or
    padding around it.
    """
    preprocessing, spacing = member.preprocessing, crop.native_spacing_mm
    if member.targets.per_voxel:
        return
    if tuple(prepared) != member.window.patch_size:
        actual, expected = map(size_text, (prepared, member.window.patch_size))
        trained = f"the network was trained on images of {expected}"
        raise ValueError(f"{path}: {actual} voxels after preprocessing, {trained}")
    alike = all(low == mm == high for mm, (low, high) in zip(spacing, member.spacing_range_mm, strict=False))
    # With several spacings, images are resampled, and scans of one native size get several sizes.
    if not member.rounding or not alike or preprocessing.frame is None:
        return
    size = resampled_shape(crop.shape[:2], spacing[:2], preprocessing.spacing_mm)
    if rounded_up(size, member.rounding) != preprocessing.frame:
        actual, expected = map(size_text, (size, preprocessing.frame))
        raise ValueError(
            f"{path}: {actual} pixels, the network was trained on images of one size and takes {expected}; "
            "resize the image, or train with data.resize"
        )


def _check_same(first: LoadedModel, other: LoadedModel) -> None:
    """Raises: ValueError: no mean can be taken over the two."""
    for name, property_of in (
        ("targets", lambda m: m.targets.description),
        ("classes", lambda m: ", ".join(m.class_names)),
        ("channels", lambda m: f"{len(m.modalities)}: {', '.join(m.modalities)}"),
        ("images", lambda m: f"{m.preprocessing.image_dims}D"),
        ("data.source_spacing_mm", lambda m: str(m.source_spacing_mm)),
    ):
        if property_of(first) != property_of(other):
            raise ValueError(
                f"{other.path}: cannot be averaged with {first.path}, its {name} differ: "
                f"{property_of(other)}; there {property_of(first)}"
            )
