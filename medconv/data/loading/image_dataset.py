"""Datasets of whole images with image-level targets, for training and validation.

As with patches, every training sample is a pure function of (seed, sample number).
"""

from collections.abc import Callable, Sequence
from typing import Any

import monai.data
import numpy as np
import torch

from medconv.data.case import Case
from medconv.data.loading.patch_dataset import Sample, in_order
from medconv.data.preprocessing.store import Store
from medconv.data.random_streams import RandomStream, generator

_IN_MEMORY = 256 * 2**20  # bytes; prepared images up to this size are kept in memory, which is faster


class ImageCases(monai.data.Dataset):
    """Whole cases for validation.

    Item: image (channels, *frame) float32, label (values,) float32, case id.
    Raises: ValueError: a case's prepared files cannot be read.
    """

    def __init__(
        self, store: Store, cases: Sequence[Case], transform: Callable[[Sample], Sample] | None = None
    ) -> None:
        super().__init__(list(cases), transform)
        self.data: Any = np.array([case.id for case in cases])  # one block of memory, as in PatchDataset
        self.values = torch.tensor([case.values for case in cases], dtype=torch.float32)
        self.store = store
        first = store.read(cases[0].id).image
        fits = first.nbytes * len(cases) <= _IN_MEMORY
        self.images = torch.from_numpy(self._all(first)) if fits else None

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return {**self.item(index), "case": str(self.data[index])}

    def item(self, place: int) -> Sample:
        """Image and label of the case at this index."""
        if self.images is not None:
            return {"image": self.images[place], "label": self.values[place]}
        image = self.store.read(str(self.data[place])).image
        return {"image": torch.from_numpy(np.array(image)), "label": self.values[place]}

    def describe(self, index: int) -> tuple[str, str]:
        """The case, and its purpose."""
        return str(self.data[index]), "validation"

    def _all(self, first: np.ndarray) -> np.ndarray:
        images = np.empty((len(self.data), *first.shape), np.float32)
        for place, case in enumerate(self.data):
            image = self.store.read(str(case)).image
            if image.shape != first.shape:
                raise ValueError(
                    f"case {case}: its prepared image has shape {image.shape}, expected {first.shape}"
                )
            images[place] = image
        return images


class ImageDataset(ImageCases):
    """Training samples; index n is sample number n, without an upper limit.

    Item: image (channels, *frame) float32, label (values,) float32, sample n.
    Args: draw_from: indices of cases per class, to draw each class equally often; None: each case
    equally often. transform, weights: as in `PatchDataset`.
    """

    def __init__(
        self,
        store: Store,
        cases: Sequence[Case],
        seed: int,
        draw_from: Sequence[Sequence[int]] | None = None,
        transform: Callable[[Sample], Sample] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(store, cases, transform)
        self.weights = None if weights is None else np.array(weights)
        groups = [range(len(cases))] if draw_from is None else [places for places in draw_from if len(places)]
        self.seed, self.groups = seed, [np.array(places) for places in groups]
        self._turns: dict[int, tuple[int, np.ndarray]] = {}

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return self.transform({**self.item(self.place_of(index)), "sample": index})  # type: ignore[no-any-return]

    def place_of(self, index: int) -> int:
        """Classes take turns, in a new random order each round; so do the cases of each class."""
        if len(self.groups) == 1:
            return int(self.groups[0][self._in_turn(0, index, len(self.groups[0]), self._weights_of(0))])
        round_, _ = divmod(index, len(self.groups))
        group = self._in_turn(len(self.groups), index, len(self.groups))
        count, weights = len(self.groups[group]), self._weights_of(group)
        return int(self.groups[group][self._in_turn(group, round_, count, weights)])

    def describe(self, index: int) -> tuple[str, str]:
        """The case of a sample, and a description of the sample."""
        return str(self.data[self.place_of(index)]), f"training sample {index}"

    def _weights_of(self, group: int) -> np.ndarray | None:
        return None if self.weights is None else self.weights[self.groups[group]]

    def _in_turn(self, key: int, index: int, count: int, weights: np.ndarray | None = None) -> int:
        """Item `index` of an endless sequence of permutations of `count` items. Args: key: which sequence."""
        turn, place = divmod(index, count)
        if self._turns.get(key, (-1,))[0] != turn:
            if key == 0:
                rng = generator(self.seed, RandomStream.CASE_ORDER, turn)
            else:
                rng = generator(self.seed, RandomStream.BALANCED_ORDER, turn, key)
            self._turns[key] = turn, in_order(rng, count, weights)
        return int(self._turns[key][1][place])
