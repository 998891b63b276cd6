"""Datasets of whole images with image-level targets, for training and validation, and their balanced sampler.

As with patches, every training sample is a pure function of (seed, sample number).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import monai.data
import numpy as np
import torch

from medconv.config import ConfigError, DataConfig
from medconv.data.case import Case, Dataset
from medconv.data.loading.patch import PackedReading, Sample
from medconv.data.loading.samplers import CaseRounds, Sampler, TrainingCases
from medconv.data.loading.samples import Samples
from medconv.data.preprocessing.fingerprint import Fingerprint
from medconv.data.preprocessing.preprocess import Entry
from medconv.data.preprocessing.store import Store
from medconv.data.splits import DataSplit, values_of
from medconv.features.image_level.targets import ImageLevelTargets

_IN_MEMORY = 256 * 2**20  # bytes; prepared images up to this size are kept in memory, which is faster
# Of an epoch: each image several times, but neither very few nor very many
_FEWEST_SAMPLES = 1000
_MOST_SAMPLES = 5000
_SAMPLES_PER_IMAGE = 5
# Pixels along the longer edge: radiographs are often scaled to 224 to 512
_EXAMPLE_EDGE = 512


def samples_per_epoch(num_cases: int) -> int:
    """Where the config sets no number.

    The best of many validations by few cases may be an early checkpoint by chance
    (experiments/classifiers.md).
    """
    return min(max(_FEWEST_SAMPLES, _SAMPLES_PER_IMAGE * num_cases), _MOST_SAMPLES)


def check(split: DataSplit, dataset: Dataset, measured: Fingerprint, data: DataConfig) -> None:
    """Raises: ValueError: no classes to draw equally often, or images of different sizes."""
    if data.balanced_sampling:
        dataset.targets.balanced_groups(values_of(split.train))
    is_sized = data.resize is not None or data.patch_size is not None
    if measured.spatial_dims != 2 or is_sized or len(set(measured.shapes)) == 1:
        return
    common, _ = Counter(measured.shapes).most_common(1)[0]
    case, size = next((c, s) for c, s in zip(dataset.cases, measured.shapes, strict=True) if s != common)
    scale = min(1, _EXAMPLE_EDGE / max(common))
    resize = ",".join(str(max(1, round(edge * scale))) for edge in common)
    raise ConfigError(
        f"{case.images[0]}: {size[0]} x {size[1]} pixels, while most pictures have {common[0]} x "
        f"{common[1]}; expected one size; data.resize=[{resize}], for example, scales all of them to it"
    )


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
        transform: Callable[[Sample], Sample] | None = None,
    ) -> None:
        super().__init__(store, cases, transform)
        self.sampler = sampler

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        sample = {**self.item(self.case_index(index)), "sample": index}
        return self.transform(sample)  # type: ignore[no-any-return]

    def case_index(self, index: int) -> int:
        """Index of a sample's case."""
        return self.sampler.case_index(index)

    def describe(self, index: int) -> tuple[str, str]:
        """The case of a sample, and a description of the sample."""
        return str(self.data[self.case_index(index)]), f"training sample {index}"


@dataclass(frozen=True)
class Images(Samples):
    """Whole images with values."""

    validates_batches: ClassVar[bool] = True
    verifies: ClassVar[bool] = True

    def training(self, store: Store, cases: Sequence[Case], packed: PackedReading | None) -> ImageDataset:
        return ImageDataset(store, cases, self.sampler, self.sample_augment)

    def validation(self, store: Store, cases: Sequence[Case]) -> ImageCases:
        return ImageCases(store, cases)

    def voxels(self, entry: Entry, packed: PackedReading | None) -> float:
        return prod(entry.image.shape[1:])


class BalancedImageSampler(Sampler):
    """Classes take turns, in a new random order each round; so do the cases of each class, by weight."""

    balances_classes = True

    def __init__(self, cases: TrainingCases) -> None:
        super().__init__(cases)
        self._indices = [np.array(indices) for indices in cases.class_indices() if len(indices) > 0]
        self._class_rounds = CaseRounds(self.seed, len(self._indices), class_number=len(self._indices))
        self._case_rounds = []
        for class_number, indices in enumerate(self._indices):
            weights = None if self.weights is None else self.weights[indices]
            # The first class takes the random numbers of all cases, as it always has, so seeded runs stay
            self._case_rounds.append(CaseRounds(self.seed, len(indices), weights, class_number or None))

    def case_index(self, sample: int) -> int:
        num_classes = len(self._indices)
        if num_classes == 1:
            return int(self._indices[0][self._case_rounds[0].index(sample)])
        class_number = self._class_rounds.index(sample)
        # Each class comes once a round, so the round's number is the number of its sample, too.
        sample_of_class = sample // num_classes
        position = self._case_rounds[class_number].index(sample_of_class)
        return int(self._indices[class_number][position])


def class_indices(cases: Sequence[Case], targets: ImageLevelTargets) -> list[list[int]]:
    """Indices of the cases of each class. Raises: ValueError: targets without classes."""
    return [group.tolist() for group in targets.balanced_groups(values_of(cases))]
