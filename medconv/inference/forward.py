"""Prepared images through the networks: a volume by sliding windows, or a batch of whole images at once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medconv.data.preprocessing.preprocess import PreprocessingConfig, SlabGrid
from medconv.inference.extras import Extra
from medconv.inference.load import LoadedModel
from medconv.inference.logit_stream import LogitFile, LogitSource, WholeLogits
from medconv.inference.prepare import Input
from medconv.inference.slab_answer import (
    Group,
    KeptLogits,
    LabelMapScores,
    Source,
    WeightedGrid,
    label_map_of,
    mean_logits,
)
from medconv.inference.sliding_window import slab_axis
from medconv.models.outputs import full_resolution
from medconv.performance.switches import to_memory_format
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.hardware import autocast_dtype, release_freed_memory

# Voxels. Loading a CT of 512 x 512 x 150 leaves 400 MB free, which the sum of its logits cannot use.
_LARGE = 2**24
# Of a prepared image; float16 ends at 65504.
_FAR_VALUE = 1e4


class Forward(ABC):
    """Networks of the same targets, which give a mean.

    Args:
        members: the networks.
        device: where they run, as torch names it.
        batch_size: cases in one call.
    """

    batch_size: int = 1

    def __init__(self, members: Sequence[LoadedModel], device: str) -> None:
        self.members = tuple(members)
        self.device = device
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
    """Sliding windows. Members with the same preprocessing give the mean of their logits.

    Args:
        extras: those that need logits get an answer of their own for each case.
    """

    def __init__(self, members: Sequence[LoadedModel], device: str, extras: Sequence[Extra] = ()) -> None:
        super().__init__(members, device)
        self._extras = [extra for extra in extras if extra.needs_logits]

    def __call__(
        self, inputs: Sequence[Input], keeps_logits: bool = False, logit_folder: Path | None = None
    ) -> list[LabelMapScores]:
        return [self._scores(case_input, keeps_logits, logit_folder) for case_input in inputs]

    def _scores(self, case_input: Input, keeps_logits: bool, logit_folder: Path | None) -> LabelMapScores:
        targets = self.members[0].targets
        assert isinstance(targets, SegmentationTargets)
        if prod(case_input.crop.content_shape) > _LARGE:
            release_freed_memory()
        # One image for each preprocessing.
        images = [case_input.arrays[self.preprocessings.index(each.preprocessing)] for each in self.members]
        axis = slab_axis([each.window for each in self.members], [image.shape[1:] for image in images])
        only_labels = not (keeps_logits or self._extras or logit_folder)
        groups: list[Group] = []
        prepared = zip(self.preprocessings, case_input.arrays, case_input.crops, strict=True)
        for preprocessing, array, crop in prepared:
            sharing = [member for member in self.members if member.preprocessing == preprocessing]
            grid = SlabGrid(crop, axis, array.shape[1 + axis])
            sources = self._sources(sharing, array, grid, keeps_logits, only_labels)
            weight = len(sharing) / len(self.members)
            check = partial(check_finite, "logits", sharing[0], array)
            groups.append(Group(grid, weight, sources, check))
        files: list[LogitFile] = []
        kept = None
        if keeps_logits:
            groups, kept = _kept(groups)
        elif logit_folder is not None:
            files = [LogitFile(group.grid.source_length, logit_folder) for group in groups]
            kept = KeptLogits(_grids(groups), files)
        answers = {extra.flag: extra.answer(groups, targets) for extra in self._extras}
        label = label_map_of(groups, targets, list(answers.values()), files)
        return LabelMapScores(label, case_input.crop, targets, answers, kept)

    def _sources(
        self,
        members: Sequence[LoadedModel],
        array: np.ndarray,
        grid: SlabGrid,
        keeps_logits: bool,
        only_labels: bool,
    ) -> list[Source]:
        """Of members with one preprocessing; those with the same windows share a sum."""
        image = torch.from_numpy(array).to(self.device)
        sharing: list[list[LoadedModel]] = []
        for member in members:
            group = next((group for group in sharing if group[0].window == member.window), None)
            if group is None or self._extras:  # which get the logits of each
                sharing.append([member])
            else:
                group.append(member)
        sources: list[Source] = []
        for group in sharing:
            logits = self._stream(group, image, grid, keeps_logits, only_labels)
            sources.append(Source(logits, share=len(group) / len(members)))
        return sources

    def _stream(
        self,
        members: Sequence[LoadedModel],
        image: Tensor,
        grid: SlabGrid,
        keeps_logits: bool,
        only_labels: bool,
    ) -> LogitSource:
        """The mean of members with the same windows."""
        window = members[0].window.in_small_batches(members[0].targets.num_outputs, image.device)
        network = _mean_network(members, self.device)
        if window.slice_axis not in (None, grid.axis):
            # Slices along another axis than those of another member.
            logits = window(network, image[None])[0]
            return WholeLogits(logits.movedim(1 + grid.axis, 1))
        planes_at_once = None if keeps_logits else grid.planes_at_once
        return window.stream(network, image, grid.axis, planes_at_once, only_labels)


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


def autocast(precision: str, device: str) -> torch.autocast:
    """The autocast that Lightning uses for this `trainer.precision`."""
    dtype = autocast_dtype(precision)
    return torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None)


def _mean_network(members: Sequence[LoadedModel], device: str) -> Callable[[Tensor], Tensor]:
    """Windows to the mean of the members' logits, each in its own precision."""

    def logits_of(member: LoadedModel, windows: Tensor) -> Tensor:
        with autocast(member.precision, device):
            return full_resolution(network_of(member)(windows))

    def mean(windows: Tensor) -> Tensor:
        total = logits_of(members[0], windows)
        if len(members) == 1:
            return total
        total = total.float()
        for member in members[1:]:
            total = total + logits_of(member, windows)
        return total / len(members)

    return mean


def network_of(member: LoadedModel) -> Callable[[Tensor], Any]:
    return lambda images: member.network(to_memory_format(images, member.memory_format))


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
