"""From the networks' logits to a label map on the grid of the image's content, a slab at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from medconv.data.preprocessing.preprocess import CropInfo, Slab, SlabGrid, to_native
from medconv.inference.logit_file import LogitFile
from medconv.targets.segmentation import SegmentationTargets

Result = TypeVar("Result")


class LogitSource(Protocol):
    """Logits of an image along one axis, whose planes are asked for in order."""

    def take(self, first: int, stop: int) -> Tensor:
        """The planes from `first` to `stop`; those before `first` are never asked for again.

        They may lie in memory that the next call changes.
        Shape: (classes, stop - first, *in_plane), float16, float32 or float64.
        """


@dataclass
class WholeLogits:
    """Logits that are in memory already. Args: logits: (classes, length, *in_plane)."""

    logits: Tensor

    def take(self, first: int, stop: int) -> Tensor:
        return self.logits[:, first:stop]

    def channels(self, planes: slice) -> Sequence[Tensor]:
        """Each (planes, *in_plane)."""
        return self.logits[:, planes].unbind()


class LogitSink(Protocol):
    """Takes the logits of an image, slab by slab."""

    def put(self, first: int, logits: Tensor) -> None:
        """The planes from `first`; the first ones of them may have come before, and none is left out.

        Shape: logits (outputs, planes, *in_plane).
        """


class SlabAnswer(Protocol):
    """What follows for a case from its logits beside the label map, put together slab by slab."""

    def put(self, slab: Slab, mean: SlabLogits, networks: Sequence[SlabLogits]) -> None:
        """Args: slab: of the content. mean: over all networks. networks: each by itself."""


@dataclass(frozen=True)
class Source:
    """The logits of one network or several. Args: share: of the networks with the same preprocessing."""

    logits: LogitSource
    share: float


@dataclass(frozen=True)
class WeightedGrid:
    """What networks with the same preprocessing add to an answer.

    Args:
        grid: to the content's grid.
        weight: the networks' share of all.
    """

    grid: SlabGrid
    weight: float


@dataclass(frozen=True)
class Group(WeightedGrid):
    """The logits of networks with the same preprocessing.

    Args:
        sources: of the networks; their weighted mean counts.
        check: raises an error if a slab's mean logits cannot be used.
    """

    sources: Sequence[Source]
    check: Callable[[Tensor], None]

    def mean(self, first: int, stop: int) -> Tensor:
        """The mean logits of some planes, for answers that need no network by itself.

        Raises: ValueError: as `check`.
        """
        logits = [source.logits.take(first, stop) for source in self.sources]
        mean = mean_logits(logits, [source.share for source in self.sources])
        self.check(mean)
        return mean


def label_map_of(
    groups: Sequence[Group],
    targets: SegmentationTargets,
    answers: Sequence[SlabAnswer] = (),
    sinks: Sequence[LogitSink] = (),
) -> np.ndarray:
    """The label map, from the mean of logits, or of probabilities where there are several groups.

    Shape: -> (R, A, S) in canonical axes, uint8, with label values above 255 int16.

    Args:
        groups: each with the same content and axis.
        answers: what else follows from the logits.
        sinks: get the mean logits of each group; none: no one else needs them.
    Raises:
        OSError: as `LogitSink.put`.
        ValueError: as `Group.check`.
    """
    grid = groups[0].grid
    # Not touched before it is filled, so it takes no memory where it is not.
    label = np.empty(grid.crop_info.content_shape, label_type(targets))
    planes_of_label = np.moveaxis(label, grid.axis, 0)
    # All groups have the same planes of the content in a slab, and each its own planes of the prediction.
    for slabs in zip(*(group.grid.slabs() for group in groups), strict=True):
        # The networks run now, on the windows that these planes need.
        networks: list[SlabLogits] = []
        means: list[Tensor] = []
        for group, slab in zip(groups, slabs, strict=True):
            logits = [source.logits.take(slab.sources.start, slab.sources.stop) for source in group.sources]
            networks += [SlabLogits([group], [slab], [one], targets) for one in logits]
            shares = [source.share for source in group.sources]
            means.append(logits[0] if len(logits) == 1 else mean_logits(logits, shares))
            group.check(means[-1])
        for sink, slab, mean in zip(sinks, slabs, means, strict=bool(sinks)):
            sink.put(slab.sources.start, mean)
        # What follows from the mean: the label map, and what features ask for.
        mean_of_all = SlabLogits(groups, slabs, means, targets)
        planes_of_label[slabs[0].first : slabs[0].stop] = with_cpu_fallback(SlabLogits.label, mean_of_all)
        for answer in answers:
            answer.put(slabs[0], mean_of_all, networks)
    return label


def label_type(targets: SegmentationTargets) -> type[np.generic]:
    """One byte a voxel where that is enough: of 512 x 512 x 700 voxels two are 350 MB."""
    return np.uint8 if max(targets.written) <= np.iinfo(np.uint8).max else np.int16


@dataclass(frozen=True)
class SlabLogits:
    """The mean logits of each group, (outputs, planes, *in_plane), for a slab."""

    groups: Sequence[Group]
    slabs: Sequence[Slab]
    logits: Sequence[Tensor]
    targets: SegmentationTargets

    def label(self) -> np.ndarray:
        """Shape: (planes, *in_plane) of the content, int16."""
        if len(self.logits) == 1:
            label = self.targets.decode(self.groups[0].grid.channels(self.logits[0], self.slabs[0]))
        else:
            label = self.targets.decode_mean(self.mean_probabilities())
        return label.cpu().numpy()

    def cpu(self) -> SlabLogits:
        return replace(self, logits=[logits.cpu() for logits in self.logits])

    def mean_probabilities(self) -> Iterator[Tensor]:
        """Each channel, (planes, *in_plane) of the content."""
        channels = [logits.unbind() for logits in self.logits]
        mean = MeanProbabilities(self.groups, self.slabs, channels, self.targets)
        return (mean.channel(index) for index in range(self.targets.num_outputs))


class MeanProbabilities:
    """The weighted mean over groups for a slab.

    Args:
        slabs: of each group, with the same planes of the content.
        logits: of each group, its channels, each (planes of `slab.sources`, *in_plane).
    """

    def __init__(
        self,
        grids: Sequence[WeightedGrid],
        slabs: Sequence[Slab],
        logits: Sequence[Sequence[Tensor]],
        targets: SegmentationTargets,
    ) -> None:
        self._groups = list(zip(grids, slabs, logits, strict=True))
        self._targets = targets
        # A softmax needs the sum over all channels before the first probability.
        self._log_totals = [
            targets.log_total(weighted.grid.channels(channels, slab))
            for weighted, slab, channels in self._groups
        ]

    def channel(self, index: int) -> Tensor:
        """Shape: -> (planes, *in_plane) of the content."""
        means: list[Tensor] = []
        for (weighted, slab, channels), log_total in zip(self._groups, self._log_totals, strict=True):
            (logits,) = weighted.grid.channels([channels[index]], slab)
            means.append(weighted.weight * self._targets.probability(logits, log_total))
        return reduce(torch.add, means)


def with_cpu_fallback(compute: Callable[..., Result], *logits: Tensor | SlabLogits) -> Result:
    """`compute(*logits)`, on the CPU if the GPU runs out of memory."""
    try:
        return compute(*logits)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return compute(*(each.cpu() for each in logits))


def mean_logits(logits: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The weighted mean. Args: shares: they add up to 1."""
    # Where one network's sum did not fit into GPU memory.
    if len({each.device for each in logits}) > 1:
        logits = [each.cpu() for each in logits]
    # Sums of fp16 may overflow.
    dtype = reduce(torch.promote_types, [each.dtype for each in logits], torch.float32)
    weighted = [share * each.to(dtype) for share, each in zip(shares, logits, strict=True)]
    return torch.stack(weighted).sum(0)


@dataclass(frozen=True)
class KeptLogits:
    """All logits of a case, for its probabilities.

    Args:
        grids: one per preprocessing.
        means: the mean logits of each, in memory or in a file.
    """

    grids: Sequence[WeightedGrid]
    means: Sequence[WholeLogits | LogitFile]


@dataclass(frozen=True)
class LabelMapScores:
    """The networks' answer for a case.

    Args:
        label: of the content, in canonical axes, (R, A, S) uint8 or int16.
        crop: where the content lies in the image.
        targets: what the outputs mean.
        answers: what else follows from the logits, by the flag of the `Extra` that asked for it.
        kept: all logits, if they are kept.
    """

    label: np.ndarray
    crop: CropInfo
    targets: SegmentationTargets
    answers: Mapping[str, SlabAnswer] = field(default_factory=dict)
    kept: KeptLogits | None = None

    @property
    def logits(self) -> list[Tensor]:
        """Per preprocessing the mean over members, (outputs, *spatial); they must be in memory."""
        assert self.kept is not None
        all_logits: list[Tensor] = []
        for mean, weighted in zip(self.kept.means, self.kept.grids, strict=True):
            assert isinstance(mean, WholeLogits)
            all_logits.append(mean.logits.movedim(1, 1 + weighted.grid.axis))
        return all_logits

    @property
    def values(self) -> Tensor:
        """What two networks are compared by."""
        return self.logits[0]

    def answer(self) -> np.ndarray:
        """The label map on the image's own grid, (X, Y, Z) int16; outside the crop it is background."""
        return self.targets.answer(to_native(self.label, self.crop).astype(np.int16))

    @torch.inference_mode()
    def probabilities(self) -> Iterator[np.ndarray]:
        """One channel after the other, each (X, Y, Z) float32; the logits must have been kept.

        The channels are background and classes, which add up to 1, or regions. Outside the crop all is
        background. In memory are one channel and, for classes, the sum over all of them.
        """
        assert self.kept is not None
        grids = self.kept.grids
        slabs_of_grids = list(zip(*(weighted.grid.slabs() for weighted in grids), strict=True))
        means: list[MeanProbabilities] = []
        for slabs in slabs_of_grids:
            pairs = zip(self.kept.means, slabs, strict=True)
            logits = [mean.channels(slab.sources) for mean, slab in pairs]
            means.append(MeanProbabilities(grids, slabs, logits, self.targets))
        for index in range(self.targets.num_outputs):
            content = np.empty(self.crop.content_shape, np.float32)
            planes = np.moveaxis(content, grids[0].grid.axis, 0)
            for slabs, mean in zip(slabs_of_grids, means, strict=True):
                planes[slabs[0].first : slabs[0].stop] = mean.channel(index).cpu().numpy()
            is_background = index == 0 and self.targets.exclusive
            yield to_native(content, self.crop, outside=float(is_background))
