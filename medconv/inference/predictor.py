"""From an image to its answer, a label map or image-level outputs, by one network or the mean of several."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nibabel.spatialimages import SpatialImage

from medconv.data.case import Case
from medconv.data.per_case import check_source_spacing, source_spacing
from medconv.inference.extras import Extra
from medconv.inference.forward import Forward, LabelMapForward
from medconv.inference.inputs import name_of
from medconv.inference.load import LoadedModel, load, with_window
from medconv.inference.prepare import (
    ImageLike,
    Input,
    NamedImage,
    from_array,
    from_files,
    from_nibabel,
    prepare,
)
from medconv.inference.slab_answer import LabelMapScores
from medconv.inference.sliding_window import check_batch_size, check_overlap
from medconv.utils.errors import ArgumentError

log = logging.getLogger(__name__)
_HEADER_SPACING = "its spacing is its header's; training stated that of some cases"


class Predictor:
    """One trained network, or the mean of several.

    Networks for label maps with the same preprocessing, such as the folds of one configuration: the mean of
    their logits, on the prepared grid. Where preprocessing differs, such as 2D and 3D, logits have no common
    grid and scale: the mean of the probabilities on the image's own grid, each member having the same weight.
    Image-level networks: the mean of their probabilities or numbers.

    Args:
        members: the networks, from `inference.load.load`.
        device: where they run, as torch names it.
        batch_size: whole images in one forward pass of image-level networks; None: by their size.
        extras: what features add; they change label maps here, and are written by an `Output`.
    Raises:
        ValueError: members that were not trained for the same targets, channels or dimensions.
    Source: means over folds as in Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """

    def __init__(
        self,
        members: Sequence[LoadedModel],
        device: str = "cpu",
        batch_size: int | None = None,
        extras: Sequence[Extra] = (),
    ) -> None:
        self.members = tuple(members)
        self.extras = tuple(extras)
        first = self.members[0]
        for member in self.members[1:]:
            check_same(first, member)
        self.targets = first.targets
        self.class_names = first.class_names
        self.modalities = first.modalities
        self.forward: Forward
        own_forward = self.targets.family.own("forward")
        if own_forward:
            self.forward = own_forward(members, device, batch_size)
        else:
            self.forward = LabelMapForward(members, device, extras)

    @classmethod
    def load(
        cls,
        checkpoints: Path | str | Sequence[Path | str],
        device: str = "cpu",
        trusted: Sequence[str] = (),
        *,
        mirror_axes: Sequence[int] | None = None,
        overlap: float | None = None,
        sw_batch_size: int | None = None,
        source_spacing_mm: Sequence[float] | None = None,
        extras: Sequence[Extra] = (),
    ) -> Predictor:
        """From checkpoints; None keeps what each was validated with.

        Args:
            checkpoints: a run's `checkpoints/best.ckpt`, or several.
            device: where they run, as torch names it.
            trusted: packages of your own that the networks may come from.
            mirror_axes: spatial axes of test-time augmentation; without numbers, no flips.
            overlap: of windows, as a share of a window, from 0 to below 1.
            sw_batch_size: windows, or whole images, in one forward pass.
            source_spacing_mm: of the images, right, anterior, superior, in place of their headers'; without
                numbers, their headers'.
            extras: as of the class.
        Raises:
            ArgumentError: a value that is out of range, or axes along which a network never saw mirrored
                images.
            ValueError: as `inference.load.load`, no network, or no mean can be taken over them.
        """
        if overlap is not None:
            check_overlap("overlap", overlap)
        if sw_batch_size is not None:
            check_batch_size("sw_batch_size", sw_batch_size)
        if isinstance(checkpoints, (str, Path)):
            checkpoints = [checkpoints]
        members = [load(Path(path), trusted, device, mirror_axes) for path in checkpoints]
        if not members:
            raise ValueError("checkpoints are needed: the networks to predict with")
        members = [with_window(member, overlap, sw_batch_size) for member in members]
        if source_spacing_mm is not None:
            if source_spacing_mm:
                check_source_spacing(list(source_spacing_mm), "source_spacing_mm")
            stated = list(source_spacing_mm) or None
            members = [replace(member, source_spacing_mm=stated) for member in members]
        return cls(members, device, sw_batch_size, extras)

    @property
    def train_cases(self) -> frozenset[str]:
        """Names of the cases that at least one of the networks was trained on."""
        cases: frozenset[str] = frozenset()
        for member in self.members:
            cases |= member.train_cases
        return cases

    @property
    def takes_missing(self) -> bool:
        """Whether all networks were trained to predict cases that lack channels."""
        return all(member.takes_missing for member in self.members)

    def __call__(
        self,
        *images: ImageLike | None,
        affine: np.ndarray | None = None,
        spacing_mm: Sequence[float] | None = None,
    ) -> np.ndarray:
        """The label map, or the image-level outputs, of one case.

        Args:
            images: paths or nibabel images, one per channel or one with all channels; or one array,
                (channels, X, Y, Z) or (X, Y, Z), of 2D images without Z. None among paths: a missing channel.
            affine: of an array, (4, 4): voxel indices to mm (right, anterior, superior).
            spacing_mm: of an array's spatial axes, which point right, anterior and superior, in place of
                `affine`.
        Returns:
            (X, Y, Z) int16 on the grid of the image, Z = 1 if it is 2D; or (names,) float32, probabilities
            or numbers.
        Raises:
            ValueError: an image that cannot be read, or does not fit the network.
        """
        return self.answer(self._scores_of(images, affine, spacing_mm))

    def label_and_probabilities(
        self,
        *images: ImageLike | None,
        affine: np.ndarray | None = None,
        spacing_mm: Sequence[float] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The label map of one case, and the probabilities, in one forward pass.

        Args: as for a call.
        Returns:
            The label map, (X, Y, Z) int16; and (channels, X, Y, Z) float32, before post-processing:
            background and classes, which add up to 1, or regions.
        Raises:
            ValueError: as for a call, or networks for whole images, whose answers are probabilities or
                numbers already.
        """
        if not self.targets.per_voxel:
            raise ValueError("label maps are needed; image-level networks give one answer, by a call")
        scores = self._scores_of(images, affine, spacing_mm, keeps_logits=True)
        assert isinstance(scores, LabelMapScores)
        return self.answer(scores), np.stack(list(scores.probabilities()))

    def read(self, case: Case) -> Input:
        """Read and prepare the images of a case.

        Raises:
            ValueError: its files cannot be read, or do not fit the network.
        """
        case = replace(case, source_spacing_mm=self._stated_spacing_mm(case.id))
        return self._prepared(from_files(case), has_header=True)

    @torch.inference_mode()
    def scores(
        self, inputs: Sequence[Input], keeps_logits: bool = False, logit_folder: Path | None = None
    ) -> Sequence[Any]:
        """`LabelMapScores` of each case, or those of another family of targets.

        Args: as of `Forward`.
        Raises:
            OSError: no room in `logit_folder`.
            ValueError: the networks' outputs are not finite.
        """
        return self.forward(inputs, keeps_logits, logit_folder)

    def answer(self, scores: Any) -> np.ndarray:
        """The label map after post-processing, or the image-level outputs, of what `scores` gave.

        Shape: (X, Y, Z) int16; or (names,) float32: class or label probabilities, or numbers.
        """
        answer: np.ndarray = scores.answer()
        for extra in self.extras:
            answer = extra.finish(answer, scores.crop.grid, self.targets)
        return answer

    def _scores_of(
        self,
        images: Sequence[ImageLike | None],
        affine: np.ndarray | None,
        spacing_mm: Sequence[float] | None,
        keeps_logits: bool = False,
    ) -> Any:
        case_input = self._input_of(images, affine, spacing_mm)
        if case_input.warning:
            name = case_input.case.images[0] if case_input.case.images else case_input.case.id
            log.warning("%s: %s", name, case_input.warning)
        (scores,) = self.scores([case_input], keeps_logits)  # a batch of one
        return scores

    def _input_of(
        self,
        images: Sequence[ImageLike | None],
        affine: np.ndarray | None,
        spacing_mm: Sequence[float] | None,
    ) -> Input:
        """Args: as for a call."""
        if len(images) == 1 and isinstance(images[0], np.ndarray):
            return self._input_of_array(images[0], affine, spacing_mm)
        paths = [Path(image) for image in images if isinstance(image, (str, Path))]
        in_memory = [image for image in images if isinstance(image, SpatialImage)]
        missing_channels = tuple(number for number, image in enumerate(images) if image is None)
        are_paths = bool(paths) and len(paths) + len(missing_channels) == len(images)
        if not are_paths and (not images or len(images) != len(in_memory)):
            kinds = ", ".join(type(image).__name__ for image in images) or "nothing"
            raise ArgumentError("images", f" must be paths, nibabel images, or one array, got {kinds}")
        for name, value in (("affine", affine), ("spacing_mm", spacing_mm)):
            if value is not None:
                raise ArgumentError(name, " is for an array; files and nibabel images have their own")
        if paths:
            case = Case(name_of(paths[0]), tuple(paths), missing_channels=missing_channels)
            return self.read(case)
        image = self._with_stated_spacing(from_nibabel(in_memory))
        return self._prepared(image, has_header=True)

    def _input_of_array(
        self, array: np.ndarray, affine: np.ndarray | None, spacing_mm: Sequence[float] | None
    ) -> Input:
        image = from_array(array, self.members[0].preprocessing.image_dims, affine, spacing_mm)
        # An affine comes from a header, which training may have corrected; a spacing is the caller's word.
        has_header = spacing_mm is None
        if has_header:
            image = self._with_stated_spacing(image)
        return self._prepared(image, has_header)

    def _stated_spacing_mm(self, case_id: str) -> tuple[float, ...] | None:
        """The spacing that training, or the user, stated in place of the header's."""
        return source_spacing(self.members[0].source_spacing_mm, case_id)

    def _with_stated_spacing(self, image: NamedImage) -> NamedImage:
        stated = self._stated_spacing_mm(image.case.id)
        if stated is None:
            return image
        case = replace(image.case, source_spacing_mm=stated)
        return replace(image, case=case, grid=image.grid.with_spacing_mm(stated))

    def _prepared(self, image: NamedImage, has_header: bool) -> Input:
        case_input = prepare(image, self.members, self.forward.preprocessings)
        stated_of_some = isinstance(self.members[0].source_spacing_mm, Mapping)
        if not (has_header and stated_of_some and image.case.source_spacing_mm is None):
            return case_input
        warning = _HEADER_SPACING
        if case_input.warning:
            warning = f"{case_input.warning}; {warning}"
        return replace(case_input, warning=warning)


def check_same(first: LoadedModel, second: LoadedModel) -> None:
    """Raises: ValueError: no mean can be taken over the two."""
    values_of_first = _comparable(first)
    for name, value in _comparable(second).items():
        if value != values_of_first[name]:
            raise ValueError(
                f"{second.path}: cannot be averaged with {first.path}, its {name} differ: "
                f"{value}; there {values_of_first[name]}"
            )


def _comparable(model: LoadedModel) -> dict[str, str]:
    """What must be the same for a mean, by name, in words."""
    return {
        "targets": model.targets.description,
        "classes": ", ".join(model.class_names),
        "channels": f"{len(model.modalities)}: {', '.join(model.modalities)}",
        "images": f"{model.preprocessing.image_dims}D",
        "source_spacing_mm": str(model.source_spacing_mm),
    }
