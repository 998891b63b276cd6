"""From an image to its answer, a label map or image-level outputs, by one network or the mean of several.

`Predictor` reads and prepares an image, a `Forward` runs the networks on it: `LabelMapForward` a volume by
sliding windows, that of another family of targets whole images at once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from os.path import realpath
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nibabel.spatialimages import SpatialImage
from torch import Tensor

from medconv.data.case import Case
from medconv.data.io.raster import PIXEL_MM
from medconv.data.per_case import check_source_spacing, source_spacing
from medconv.data.preprocessing.preprocess import PreprocessingConfig, SlabGrid
from medconv.inference.extras import Extra
from medconv.inference.inputs import find_cases, name_of
from medconv.inference.load import LoadedModel, checkpoints_of, load
from medconv.inference.logit_file import LogitFile
from medconv.inference.prepare import (
    ImageLike,
    Input,
    NamedImage,
    check_channels,
    from_array,
    from_files,
    from_nibabel,
    prepare,
)
from medconv.inference.slab_answer import (
    Group,
    KeptLogits,
    LabelMapScores,
    LogitSource,
    Source,
    WeightedGrid,
    WholeLogits,
    label_map_of,
    mean_logits,
)
from medconv.inference.sliding_window import slab_axis
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.digests import digest
from medconv.utils.errors import ArgumentError
from medconv.utils.hardware import release_freed_memory

log = logging.getLogger(__name__)
# Voxels. Loading a CT of 512 x 512 x 150 leaves 400 MB free, which the sum of its logits cannot use.
_LARGE = 2**24
# Of a prepared image; float16 ends at 65504.
_FAR_VALUE = 1e4


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
        # A mean needs networks whose outputs mean the same.
        first = self.members[0]
        for member in self.members[1:]:
            check_same(first, member)
        self.targets = first.targets
        self.class_names = first.class_names
        self.modalities = first.modalities
        # The networks all can do without some channels; the cases that at least one was trained on.
        self.takes_missing = all(member.takes_missing for member in self.members)
        self.train_cases = frozenset[str]().union(*(member.train_cases for member in self.members))
        # Sliding windows for label maps; another family of targets brings its own way.
        self.forward: Forward
        own_forward = self.targets.family.own("forward")
        if own_forward:
            self.forward = own_forward(members, device, batch_size)
        else:
            self.forward = LabelMapForward(members, device, extras=extras)

    def find_cases(self, source: Path, name: str = "source") -> list[Case]:
        """The cases in a file, a folder, a pattern or a list, by the names that the training images had.

        Args: name: of the argument or flag that gives `source`, for messages.
        Raises: ValueError: as `inputs.find_cases`.
        """
        return find_cases(
            source,
            len(self.modalities),
            self.targets.default_columns if source.suffix == ".csv" else (),
            name,
            takes_missing=self.takes_missing,
            image_patterns=self.members[0].image_patterns,
            path_column=self.members[0].path_column,
        )

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
        progress: bool = False,
        extras: Sequence[Extra] = (),
    ) -> Predictor:
        """From checkpoints; None keeps what each was validated with.

        Args:
            checkpoints: a run's folder, which stands for all of its members, or its `checkpoints/best.ckpt`;
                or several.
            device: where they run, as torch names it.
            trusted: packages of your own that the networks may come from.
            mirror_axes: spatial axes of test-time augmentation; without numbers, no flips.
            overlap: of windows, as a share of a window, from 0 to below 1.
            sw_batch_size: windows, or whole images, in one forward pass.
            source_spacing_mm: of the images, right, anterior, superior, in place of their headers'; without
                numbers, their headers'.
            progress: a bar counts the windows of each image.
            extras: as of the class.
        Raises:
            ArgumentError: a value that is out of range, or axes along which a network never saw mirrored
                images.
            ValueError: as `inference.load.load`, no network, one named twice, or no mean can be taken over
                them.
        """
        if isinstance(checkpoints, (str, Path)):
            checkpoints = [checkpoints]
        files = [file for path in checkpoints for file in checkpoints_of(Path(path))]
        _check_differ(files)
        members = [load(file, trusted, device, mirror_axes) for file in files]
        if not members:
            raise ValueError("checkpoints are needed: the networks to predict with")
        # What is not given stays as in validation.
        given = {"overlap": overlap, "batch_size": sw_batch_size}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        changes["progress"] = progress
        members = [replace(member, window=replace(member.window, **changes)) for member in members]
        if source_spacing_mm is not None:
            if source_spacing_mm:
                check_source_spacing(list(source_spacing_mm))
            stated = list(source_spacing_mm) or None
            members = [replace(member, source_spacing_mm=stated, takes_pixels=False) for member in members]
        return cls(members, device, sw_batch_size, extras)

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
            (X, Y, Z) int16, int32 of more than 32767 objects, on the grid of the image, Z = 1 if it is 2D; or
            (names,) float32, probabilities or numbers.
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
        if self.targets.family.forward:
            raise ValueError("label maps are needed; these networks give another answer, by a call")
        scores = self._scores_of(images, affine, spacing_mm, keeps_logits=True)
        assert isinstance(scores, LabelMapScores)
        return self.answer(scores), np.stack(list(scores.probabilities()))

    def read(self, case: Case) -> Input:
        """Read and prepare the images of a case.

        Raises:
            ValueError: its files cannot be read, or do not fit the network.
        """
        check_channels(case, self.members)
        return self._prepared(from_files(replace(case, source_spacing_mm=None)))

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
        # One after the other, such as post-processing.
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
        # One array, or paths of which some may be None, or nibabel images: no mixture of them.
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
            first_channel = next(number for number, image in enumerate(images) if image is not None)
            case = Case(name_of(paths[0], first_channel), tuple(paths), missing_channels=missing_channels)
            return self.read(case)
        return self._prepared(from_nibabel(in_memory))

    def _input_of_array(
        self, array: np.ndarray, affine: np.ndarray | None, spacing_mm: Sequence[float] | None
    ) -> Input:
        image = from_array(array, self.members[0].preprocessing.image_dims, affine, spacing_mm)
        # An affine comes from a header, which training may have corrected; a spacing is the caller's word.
        if spacing_mm is None:
            return self._prepared(image)
        case = replace(image.case, source_spacing_mm=tuple(spacing_mm))
        image = replace(image, case=case, has_header=False)
        return prepare(image, self.members, self.forward.preprocessings)

    def _stated_mm(self, image: NamedImage) -> tuple[float, ...] | None:
        """The spacing that training, or the user, stated in place of the header's; pixels have none."""
        if self.members[0].takes_pixels:
            is_volume = image.grid.shape[2] > 1  # which the network refuses
            return None if is_volume else PIXEL_MM
        return source_spacing(self.members[0].source_spacing_mm, image.case.id)

    def _prepared(self, image: NamedImage) -> Input:
        """With the spacing that was stated in place of the header's."""
        stated_mm = self._stated_mm(image)
        if stated_mm is not None:
            case = replace(image.case, source_spacing_mm=stated_mm)
            grid = image.grid.with_spacing_mm(stated_mm)
            image = replace(image, case=case, grid=grid, own_grid=image.grid)
        return prepare(image, self.members, self.forward.preprocessings)


def _check_differ(files: Sequence[Path]) -> None:
    """Raises: ValueError: one network twice, by two names, or as a copy or link of its file."""
    if len(files) < 2:
        return
    earlier: dict[str, Path] = {}  # by content
    for file in files:
        try:
            content = digest(file)
        except OSError:  # loading says what is wrong with it
            content = str(file)
        if content in earlier:
            same = earlier[content]
            twice = "is named twice" if realpath(file) == realpath(same) else f"is the same network as {same}"
            raise ValueError(
                f"{file}: {twice}, and would count as often in the mean; the folder of a run stands for all "
                "of its members"
            )
        earlier[content] = file


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


class Forward(ABC):
    """Networks of the same targets, which give a mean.

    Args:
        members: the networks.
        device: where they run, as torch names it.
        batch_size: of whole images; windows have that of their members.
        extras: those that need logits get an answer of their own for each case.

    Attributes:
        batch_size: cases in one call.
    """

    batch_size: int = 1

    def __init__(
        self,
        members: Sequence[LoadedModel],
        device: str,
        batch_size: int | None = None,
        extras: Sequence[Extra] = (),
    ) -> None:
        self.members = tuple(members)
        self.device = device
        self.extras = [extra for extra in extras if extra.needs_logits]
        # Each image is preprocessed once in each way that some member needs.
        self.preprocessings: list[PreprocessingConfig] = []
        for member in self.members:
            if member.preprocessing not in self.preprocessings:
                self.preprocessings.append(member.preprocessing)

    @abstractmethod
    def __call__(
        self, inputs: Sequence[Input], keeps_logits: bool = False, logit_folder: Path | None = None
    ) -> Sequence[Any]:
        """The scores of each case.

        Args:
            keeps_logits: of label maps, for their probabilities, in memory; else a slab of them is.
            logit_folder: of label maps, where they are kept instead, in a temporary file.
        Raises:
            OSError: no room in `logit_folder`.
            ValueError: the networks' outputs are not finite.
        """


class LabelMapForward(Forward):
    """Sliding windows. Members with the same preprocessing give the mean of their logits."""

    def __call__(
        self, inputs: Sequence[Input], keeps_logits: bool = False, logit_folder: Path | None = None
    ) -> list[LabelMapScores]:
        targets = self.members[0].targets
        assert isinstance(targets, SegmentationTargets)
        only_labels = not (keeps_logits or self.extras or logit_folder)
        all_scores = []
        for case_input in inputs:
            if prod(case_input.crops[0].content_shape) > _LARGE:
                release_freed_memory()
            # The networks run slab by slab, in `label_map_of`, or now if all logits are kept.
            groups = self._groups(case_input, keeps_logits, only_labels)
            files: list[LogitFile] = []
            kept = None
            if keeps_logits:
                groups, kept = _kept(groups)
            elif logit_folder is not None:
                files = [LogitFile(group.grid.source_length, logit_folder) for group in groups]
                kept = KeptLogits(_grids(groups), files)
            answers = {extra.flag: extra.answer(groups, targets) for extra in self.extras}
            label = label_map_of(groups, targets, list(answers.values()), files)
            all_scores.append(LabelMapScores(label, case_input.crops[0], targets, answers, kept))
        return all_scores

    def _groups(self, case_input: Input, keeps_logits: bool, only_labels: bool) -> list[Group]:
        """The logits of the members, by their preprocessing; those with the same windows share a sum."""
        # One image for each preprocessing.
        images = [case_input.arrays[self.preprocessings.index(each.preprocessing)] for each in self.members]
        axis = slab_axis([each.window for each in self.members], [image.shape[1:] for image in images])
        groups: list[Group] = []
        prepared = zip(self.preprocessings, case_input.arrays, case_input.crops, strict=True)
        for preprocessing, array, crop in prepared:
            members = [member for member in self.members if member.preprocessing == preprocessing]
            grid = SlabGrid(crop, axis, array.shape[1 + axis])
            image = torch.from_numpy(array).to(self.device)
            planes_at_once = None if keeps_logits else grid.planes_at_once
            sharing: dict[Any, list[LoadedModel]] = {}
            for number, member in enumerate(members):
                # Extras get the logits of each.
                sharing.setdefault(number if self.extras else member.window, []).append(member)
            sources = []
            for each in sharing.values():
                logits = _stream(each, image, axis, planes_at_once, only_labels)
                sources.append(Source(logits, share=len(each) / len(members)))
            # NaN would become a label map of background, which nobody would notice.
            check = partial(check_finite, "logits", members[0], array)
            groups.append(Group(grid, len(members) / len(self.members), sources, check))
        return groups


def _stream(
    members: Sequence[LoadedModel], image: Tensor, axis: int, planes_at_once: int | None, only_labels: bool
) -> LogitSource:
    """The mean logits of members with the same windows."""
    window = members[0].window.in_small_batches(members[0].targets.num_outputs, image.device)
    network = members[0].outputs if len(members) == 1 else partial(_mean_outputs, members)
    if window.slice_axis not in (None, axis):
        # Slices along another axis than those of another member.
        logits = window(network, image[None])[0]
        return WholeLogits(logits.movedim(1 + axis, 1))
    return window.stream(network, image, axis, planes_at_once, only_labels)


def _mean_outputs(members: Sequence[LoadedModel], windows: Tensor) -> Tensor:
    """Each in its own precision."""
    total = members[0].outputs(windows).float()
    for member in members[1:]:
        total = total + member.outputs(windows)
    return total / len(members)


def _kept(groups: Sequence[Group]) -> tuple[list[Group], KeptLogits]:
    """The same groups with all of their logits in memory, and these logits."""
    kept_groups: list[Group] = []
    means: list[WholeLogits] = []
    for group in groups:
        logits = [source.logits.take(0, group.grid.source_length) for source in group.sources]
        shares = [source.share for source in group.sources]
        sources = [Source(WholeLogits(each), share) for each, share in zip(logits, shares, strict=True)]
        kept_groups.append(replace(group, sources=sources))
        means.append(WholeLogits(mean_logits(logits, shares)))
    return kept_groups, KeptLogits(_grids(groups), means)


def _grids(groups: Sequence[Group]) -> list[WeightedGrid]:
    """Without the images and sums that the groups hold."""
    return [WeightedGrid(group.grid, group.weight) for group in groups]


def check_finite(kind: str, member: LoadedModel, images: np.ndarray | Tensor, values: Tensor) -> None:
    """Raises: ValueError: not finite; it blames the images where they are far from what a network is fed."""
    # A finite sum has finite terms only. `isfinite` copies, but huge terms may overflow the sum.
    if bool(values.sum(dtype=torch.float32).isfinite()) or bool(values.isfinite().all()):
        return
    cause = f"the network's {kind} are not finite (precision={member.precision})"
    low = float(images.min())
    high = float(images.max())
    if max(-low, high) > _FAR_VALUE:
        by = "/".join(dict.fromkeys(member.preprocessing.normalisation))
        cause = f"the image has values from {low:.4g} to {high:.4g} after normalisation={by}; {cause}"
    raise ValueError(cause)
