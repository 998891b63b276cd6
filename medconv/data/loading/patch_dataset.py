"""Training patches and validation cases, read from the store in loader workers.

Every training sample is a pure function of (seed, sample number): case, position and augmentation. Sample
numbers continue over epochs, so workers, ranks and restarts do not change sample n.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import monai.data
import numpy as np
import torch
from torch.utils.data import Sampler

from medconv.data.case import Case
from medconv.data.case_files import label_of
from medconv.data.io.grids import on_grid
from medconv.data.preprocessing.store import Entry, Store
from medconv.data.random_streams import RandomStream, generator

Sample = dict[str, Any]


class Annotated(NamedTuple):
    """Of a case that lacks some labels. Args: values: label values that are annotated. outputs: as
    `targets.annotated_outputs`.
    """

    values: tuple[int, ...]
    outputs: tuple[bool, ...]


class PatchDataset(monai.data.Dataset):
    """Patches for training; index n is sample number n, without an upper limit.

    Item: image (channels, *patch_size) float32, label (1, *patch_size) uint8 or int16, sample n; where cases
    lack labels, annotated (outputs,) bool.
    Args:
        cases: ids in the store. patch_size: voxels; smaller images are padded with 0 on both sides.
        oversample_foreground: share of samples that are centred on a voxel of a random class of the case. The
            others lie anywhere or, if there is a value to ignore, are centred on a labelled voxel.
        slice_axis: with 2D patches from volumes, the axis across the slices.
        weights: how often each case is drawn, relative to others; None: all alike.
        draw_from: of each class, indices of the cases that have it: samples centred on foreground draw first
            the class, each equally often, then the case; None: the case, then one of its classes.
        annotated: by case id, where cases lack labels; no sample is centred on what is not annotated.
        read_size: sample number to the voxels to read around the centre; None: the patch size.
        transform: applied to each sample, such as a `SampleTransforms`; other transforms of MONAI draw new
            random numbers in each worker and run.
    """

    def __init__(
        self,
        store: Store,
        cases: Sequence[str],
        patch_size: Sequence[int],
        seed: int,
        oversample_foreground: float,
        slice_axis: int | None = None,
        read_size: Callable[[int], Sequence[int]] | None = None,
        transform: Callable[[Sample], Sample] | None = None,
        weights: Sequence[float] | None = None,
        draw_from: Sequence[Sequence[int]] | None = None,
        annotated: Mapping[str, Annotated] | None = None,
    ) -> None:
        super().__init__(cases, transform)
        self.data: Any = np.array(cases)  # one block of memory: reference counts of strings copy their pages
        self.store, self.seed = store, seed
        self.oversample_foreground, self.slice_axis = oversample_foreground, slice_axis
        self.box, self.read_size = self._with_slice_axis(patch_size), read_size
        self.weights = None if weights is None else np.array(weights)
        classes = (
            [] if draw_from is None else [(n, np.array(c)) for n, c in enumerate(draw_from, 1) if len(c)]
        )
        self.classes, self.annotated = classes, annotated or {}
        self._turn: tuple[int, np.ndarray] = (-1, np.empty(0))

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        place, wanted = self._place_of(index)
        case = str(self.data[place])
        entry, annotated = self.store.read(case), self.annotated.get(case)
        rng = generator(self.seed, RandomStream.PATCH_POSITION, index)
        if self.classes:
            start = self._start(entry, rng, *((0.0, None) if wanted is None else (1.0, [wanted])))
        else:
            start = self._start(entry, rng, self.oversample_foreground, annotated and annotated.values)
        box = self.box if self.read_size is None else self._with_slice_axis(self.read_size(index))
        start = tuple(s - (b - n) // 2 for s, b, n in zip(start, box, self.box, strict=True))
        sample: Sample = {
            "image": torch.from_numpy(self._without_slice_axis(crop(entry.image, start, box))),
            "label": torch.from_numpy(self._without_slice_axis(crop(entry.label[None], start, box))),
            "sample": index,
        }
        if annotated is not None:
            sample["annotated"] = torch.tensor(annotated.outputs)
        return self.transform(sample)  # type: ignore[no-any-return]

    def case_of(self, index: int) -> str:
        """Cases come in a new random order each round."""
        return str(self.data[self._place_of(index)[0]])

    def _place_of(self, index: int) -> tuple[int, int | None]:
        """The index of a sample's case; and the class of its central voxel, where classes are drawn first."""
        if self.classes:
            rng = generator(self.seed, RandomStream.PATCH_CLASS, index)
            if rng.random() < self.oversample_foreground:
                value, places = self.classes[rng.integers(len(self.classes))]
                share = None if self.weights is None else self.weights[places] / self.weights[places].sum()
                return int(rng.choice(places, p=share)), value
        turn, place = divmod(index, len(self.data))
        if turn != self._turn[0]:
            rng = generator(self.seed, RandomStream.CASE_ORDER, turn)
            self._turn = turn, in_order(rng, len(self.data), self.weights)
        return int(self._turn[1][place]), None

    def describe(self, index: int) -> tuple[str, str]:
        """The case of a sample, and a description of the sample."""
        return self.case_of(index), f"training sample {index}"

    def _with_slice_axis(self, size: Sequence[int]) -> tuple[int, ...]:
        axis = len(size) if self.slice_axis is None else self.slice_axis
        return (*map(int, size[:axis]), *(() if self.slice_axis is None else (1,)), *map(int, size[axis:]))

    def _without_slice_axis(self, patch: np.ndarray) -> np.ndarray:
        return patch if self.slice_axis is None else patch.squeeze(1 + self.slice_axis)

    def _start(
        self, entry: Entry, rng: np.random.Generator, share: float, among: Sequence[int] | None
    ) -> tuple[int, ...]:
        """First voxel of the patch along each axis; negative if the image is padded.

        Args: share: of patches centred on a foreground voxel. among: the classes of such voxels; None: any.
        """
        box = np.array(self.box)
        spare = np.array(entry.label.shape) - box
        start = np.where(spare > 0, rng.integers(0, np.maximum(spare, 0) + 1), spare // 2)
        labelled, foreground = _split_rows(entry.foreground)
        if among is not None:
            foreground = foreground[np.isin(foreground[:, 0], among)]
        rows = foreground if len(foreground) and rng.random() < share else labelled
        if len(rows):
            centred = foreground_voxel(rows, rng) - box // 2
            start = np.where(spare > 0, np.clip(centred, 0, np.maximum(spare, 0)), start)
        return tuple(int(s) for s in start)


class CaseDataset(monai.data.Dataset):
    """Whole cases for validation.

    Item: image (1, channels, *spatial), label (1, 1, *spatial), reference (X, Y, Z) on the native grid, case
    id and the spacing_mm of the prepared image; where cases lack labels, annotated, a bool for each output.
    """

    def __init__(
        self, store: Store, cases: Sequence[Case], annotated: Mapping[str, Annotated] | None = None
    ) -> None:
        super().__init__(list(cases))
        self.store, self.annotated = store, annotated or {}

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        case: Case = self.data[index]
        assert case.label is not None
        entry = self.store.read(case.id)
        reference, grid = label_of(case)
        reference = on_grid(reference, case.images[0], entry.crop_info.grid, case.label, grid)
        known = {"annotated": self.annotated[case.id].outputs} if self.annotated else {}
        return {
            **known,
            "spacing_mm": entry.crop_info.spacing_mm(entry.label.shape),
            "image": torch.from_numpy(np.array(entry.image))[None],
            "label": torch.from_numpy(np.array(entry.label))[None, None],
            "reference": torch.from_numpy(reference),
            "case": case.id,
        }

    def describe(self, index: int) -> tuple[str, str]:
        """The case, and its purpose."""
        return self.data[index].id, "validation"


class SampleOrder(Sampler[int]):
    """The sample numbers of one rank, epoch by epoch.

    A global batch is `batch_size * world_size` consecutive numbers, of which each rank takes its own
    `batch_size`: two devices with batch 2 see what one device with batch 4 sees. An epoch is the smallest
    number of whole global batches with at least `samples_per_epoch` samples.
    """

    def __init__(self, samples_per_epoch: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.batch_size, self.rank, self.world_size, self.epoch = batch_size, rank, world_size, 0
        self._first_batch = 0
        self.batches = -(-samples_per_epoch // (batch_size * world_size))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def begin_at(self, batch: int) -> None:
        """Leave out the next epoch's batches before this one, if a run resumes within it."""
        self._first_batch = batch

    def __len__(self) -> int:
        return self.batches * self.batch_size

    def __iter__(self) -> Iterator[int]:
        begin, self._first_batch = self._first_batch, 0
        for batch in range(self.epoch * self.batches + begin, (self.epoch + 1) * self.batches):
            first = (batch * self.world_size + self.rank) * self.batch_size
            yield from range(first, first + self.batch_size)


def in_order(rng: np.random.Generator, count: int, weights: np.ndarray | None) -> np.ndarray:
    """Indices of `count` cases in random order; with weights, a case comes as often in all rounds as its
    weight says, and in each one time more or less at most.
    """
    order = rng.permutation(count)
    if weights is None:
        return order
    even = (rng.random() + np.arange(count)) / count
    return np.searchsorted(np.cumsum(weights) / np.sum(weights), even, side="right").clip(max=count - 1)[
        order
    ]


def _split_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of class 0, which are labelled voxels of any class (see `Entry`), and rows of the foreground."""
    first = np.searchsorted(rows[:, 0], 1) if len(rows) and rows[0, 0] == 0 else 0
    return rows[:first], rows[first:]


def foreground_voxel(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The position of a random voxel of a random class; rows (class, position) are sorted by class.

    A binary search reads only a few rows.
    """
    first, last = int(rows[0, 0]), int(rows[-1, 0])
    ends = np.searchsorted(rows[:, 0], np.arange(first, last + 2))
    present = np.flatnonzero(np.diff(ends))
    chosen = present[rng.integers(len(present))]
    return np.asarray(rows[rng.integers(ends[chosen], ends[chosen + 1]), 1:])


def crop(array: np.ndarray, start: Sequence[int], size: Sequence[int]) -> np.ndarray:
    """A box of an array (channels, *spatial), padded with 0 outside."""
    inside = [slice(max(0, s), min(n, s + p)) for s, p, n in zip(start, size, array.shape[1:], strict=True)]
    part = array[(slice(None), *inside)]
    if part.shape[1:] == tuple(size):
        return np.array(part)
    out = np.zeros((len(array), *size), array.dtype)
    place = [slice(i.start - s, i.stop - s) for i, s in zip(inside, start, strict=True)]
    out[(slice(None), *place)] = part
    return out
