"""Datasets of whole images with image-level targets, for training and validation.

As with patches, every training sample is a pure function of (seed, sample number).
"""

from collections.abc import Callable, Sequence
from typing import Any

import monai.data
import numpy as np
import torch

from medconv.data.case import Case
from medconv.data.loading.patch import Sample
from medconv.data.loading.samplers import Sampler
from medconv.data.preprocessing.store import Store

_IN_MEMORY = 256 * 2**20  # bytes; prepared images up to this size are kept in memory, which is faster


class ImageCases(monai.data.Dataset):
    """Whole cases for validation.

    Item: image (channels, *frame) float32, label (values,) float32, case id.
    Raises:
        ValueError: a case's prepared files cannot be read.
    """

    def __init__(
        self, store: Store, cases: Sequence[Case], transform: Callable[[Sample], Sample] | None = None
    ) -> None:
        super().__init__(list(cases), transform)
        self.data: Any = np.array([case.id for case in cases])  # one block of memory, as in PatchDataset
        self.values = torch.tensor([case.values for case in cases], dtype=torch.float32)
        self.store = store
        first_image = store.read(cases[0].id).image
        fits_in_memory = first_image.nbytes * len(cases) <= _IN_MEMORY
        self.images = torch.from_numpy(self._read_all(first_image.shape)) if fits_in_memory else None

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return {**self.item(index), "case": str(self.data[index])}

    def item(self, case_index: int) -> Sample:
        """Image and label of a case."""
        label = self.values[case_index]
        if self.images is not None:
            return {"image": self.images[case_index], "label": label}
        image = self.store.read(str(self.data[case_index]), verify=True).image
        return {"image": torch.from_numpy(np.array(image)), "label": label}

    def describe(self, index: int) -> tuple[str, str]:
        """The case, and its purpose."""
        return str(self.data[index]), "validation"

    def _read_all(self, image_shape: tuple[int, ...]) -> np.ndarray:
        images = np.empty((len(self.data), *image_shape), np.float32)
        for case_index, case_id in enumerate(self.data):
            image = self.store.read(str(case_id), verify=True).image
            if image.shape != image_shape:
                raise ValueError(
                    f"case {case_id}: its prepared image has shape {image.shape}, expected {image_shape}"
                )
            images[case_index] = image
        return images


class ImageDataset(ImageCases):
    """Training samples; index n is sample number n, without an upper limit.

    Item: image (channels, *frame) float32, label (values,) float32, sample n.
    Args:
        cases: in the order of the sampler's indices.
        transform: as in `PatchDataset`.
    """

    def __init__(
        self,
        store: Store,
        cases: Sequence[Case],
        sampler: Sampler,
        seed: int,
        transform: Callable[[Sample], Sample] | None = None,
    ) -> None:
        super().__init__(store, cases, transform)
        self.sampler = sampler
        self.seed = seed

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        sample = {**self.item(self.case_index(index)), "sample": index}
        return self.transform(sample)  # type: ignore[no-any-return]

    def case_index(self, index: int) -> int:
        """Index of a sample's case."""
        return self.sampler.case_index(self.seed, index)

    def describe(self, index: int) -> tuple[str, str]:
        """The case of a sample, and a description of the sample."""
        return str(self.data[self.case_index(index)]), f"training sample {index}"
