"""Training samples and validation cases, read from the store by MONAI datasets inside loader workers.

Every training sample is a pure function of (seed, sample number): which case, which place, which augmentation. Sample
numbers run on over epochs, so neither the number of workers or ranks nor a restart changes what sample n is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import monai.data
import numpy as np
import torch
from torch.utils.data import Sampler

from medconv.data.case import Case
from medconv.data.files import read_label
from medconv.data.store import Entry, Store

Sample = dict[str, Any]


class PatchDataset(monai.data.Dataset):
    """Patches for training; index n is sample number n, without an upper limit.

    Item: image (channels, *patch_size) float32, label (1, *patch_size) uint8 or int16, sample n.
    Args:
        cases: ids in the store. patch_size: voxels; smaller images are padded with 0 on both sides.
        foreground_share: of the samples, how many are centred on a voxel of a randomly chosen class of the case.
    """

    def __init__(
        self, store: Store, cases: Sequence[str], patch_size: Sequence[int], seed: int, foreground_share: float
    ) -> None:
        super().__init__(list(cases))
        self.store, self.patch_size, self.seed, self.foreground_share = store, tuple(patch_size), seed, foreground_share

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        case = self.case_of(index)
        entry = self.store.read(case)
        rng = np.random.default_rng([self.seed, 0, index])
        start = self._start(entry, rng)
        return {
            "image": torch.from_numpy(crop(entry.image, start, self.patch_size)),
            "label": torch.from_numpy(crop(entry.label[None], start, self.patch_size)),
            "sample": index,
        }

    def case_of(self, index: int) -> str:
        """Cases come in a new random order each time that all have been seen."""
        turn, place = divmod(index, len(self.data))
        order = np.random.default_rng([self.seed, 1, turn]).permutation(len(self.data))
        return self.data[order[place]]

    def _start(self, entry: Entry, rng: np.random.Generator) -> tuple[int, ...]:
        """First voxel of the patch along each axis; negative where the image is padded."""
        spare = np.array(entry.label.shape) - self.patch_size
        start = np.where(spare > 0, rng.integers(0, np.maximum(spare, 0) + 1), spare // 2)
        if len(entry.foreground) and rng.random() < self.foreground_share:
            classes = entry.foreground[:, 0]
            rows = entry.foreground[classes == rng.choice(np.unique(classes))]
            centred = rows[rng.integers(len(rows)), 1:] - np.array(self.patch_size) // 2
            start = np.where(spare > 0, np.clip(centred, 0, np.maximum(spare, 0)), start)
        return tuple(int(s) for s in start)


class CaseDataset(monai.data.Dataset):
    """Whole cases for validation.

    Item: image (1, channels, *spatial), label (1, 1, *spatial), reference (X, Y, Z) on the native grid, case id.
    """

    def __init__(self, store: Store, cases: Sequence[Case]) -> None:
        super().__init__(list(cases))
        self.store = store

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        case: Case = self.data[index]
        assert case.label is not None
        entry = self.store.read(case.id)
        return {
            "image": torch.from_numpy(np.array(entry.image))[None],
            "label": torch.from_numpy(np.array(entry.label))[None, None],
            "reference": torch.from_numpy(read_label(case.label)[0]),
            "case": case.id,
        }


class SampleOrder(Sampler[int]):
    """The sample numbers of one rank, epoch by epoch.

    A global batch is `batch_size * world_size` consecutive numbers, of which each rank takes its own `batch_size`: two
    devices with batch 2 see what one device with batch 4 sees. An epoch is the fewest whole global batches that hold
    `samples_per_epoch`.
    """

    def __init__(self, samples_per_epoch: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.batch_size, self.rank, self.world_size, self.epoch = batch_size, rank, world_size, 0
        self.batches = -(-samples_per_epoch // (batch_size * world_size))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches * self.batch_size

    def __iter__(self) -> Iterator[int]:
        for batch in range(self.epoch * self.batches, (self.epoch + 1) * self.batches):
            first = (batch * self.world_size + self.rank) * self.batch_size
            yield from range(first, first + self.batch_size)


def crop(array: np.ndarray, start: Sequence[int], size: Sequence[int]) -> np.ndarray:
    """A box of an array (channels, *spatial), filled with 0 where it reaches outside."""
    out = np.zeros((len(array), *size), array.dtype)
    inside = [slice(max(0, s), min(n, s + p)) for s, p, n in zip(start, size, array.shape[1:], strict=True)]
    place = [slice(i.start - s, i.stop - s) for i, s in zip(inside, start, strict=True)]
    out[(slice(None), *place)] = array[(slice(None), *inside)]
    return out
