"""What the network trains on and is validated with: patches, or what a family of targets has instead."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean
from typing import Any, ClassVar

from medconv.data.case import Case
from medconv.data.loading.patch import Batch, PackedReading, PatchShape, Sample
from medconv.data.loading.patch_dataset import Annotated, CaseDataset, ChannelDropout, PatchDataset
from medconv.data.loading.samplers import Sampler
from medconv.data.preprocessing.preprocess import Entry
from medconv.data.preprocessing.store import Store

_MEASURED = 16  # samples whose sizes tell the memory that batches need


@dataclass(frozen=True)
class Samples(ABC):
    """Makes the datasets of a run.

    Args:
        sampler: draws the case of each sample, by its index among the training cases.
        augment: applied to training batches: on the device if it is an accelerator, else in the workers. One
            whose class has `per_sample = True` is applied to each sample, always in the workers.
    """

    sampler: Sampler
    augment: Callable[[Batch], Batch]

    # A validation batch is several cases, as many as the global batch has; else it is one
    validates_batches: ClassVar[bool] = False
    # Whether reading a sample compares it with its checksum; else the store is read for that beside training
    verifies: ClassVar[bool] = False

    @abstractmethod
    def training(self, store: Store, cases: Sequence[Case], packed: PackedReading | None) -> Any:
        """Args: packed: as `packed_reading` on an accelerator."""

    @abstractmethod
    def validation(self, store: Store, cases: Sequence[Case]) -> Any:
        """Args: cases: at least one."""

    @abstractmethod
    def voxels(self, entry: Entry, packed: PackedReading | None) -> float:
        """Of a training sample that a worker sends.

        Args:
            entry: any prepared case.
            packed: as of `training`.
        """

    def packed_reading(self) -> PackedReading | None:
        """What is read for an augmentation on an accelerator; None: the sample as the network takes it."""
        return None

    @property
    def sample_augment(self) -> Callable[[Sample], Sample] | None:
        """The augmentation, if it is of each sample."""
        return self.augment if getattr(self.augment, "per_sample", False) else None

    @property
    def batch_augment(self) -> Any:
        """The augmentation, if it is of whole batches."""
        return None if getattr(self.augment, "per_sample", False) else self.augment


@dataclass(frozen=True)
class Patches(Samples):
    """Patches with label maps; whole cases in a validation.

    Args:
        annotated: by case id, where cases lack labels.
        channel_dropout: which channels they lack; None: none.
        own_reference: as of `CaseDataset`.
    """

    patch: PatchShape
    annotated: Mapping[str, Annotated] | None = None
    channel_dropout: ChannelDropout | None = None
    own_reference: Callable[..., Sample] | None = None

    def training(self, store: Store, cases: Sequence[Case], packed: PackedReading | None) -> PatchDataset:
        return PatchDataset(
            store,
            [case.id for case in cases],
            self.sampler,
            self.patch,
            annotated=self.annotated,
            values={case.id: case.values for case in cases if case.values is not None},
            read_size=getattr(self.batch_augment, "read_size", None),
            packed=packed,
            channel_dropout=self.channel_dropout,
            transform=self.sample_augment,
        )

    def validation(self, store: Store, cases: Sequence[Case]) -> CaseDataset:
        return CaseDataset(store, cases, self.annotated, self.own_reference)

    def voxels(self, entry: Entry, packed: PackedReading | None) -> float:
        if packed is None:
            return prod(self.patch.size)
        return fmean(packed.blocks_of(number).voxels for number in range(_MEASURED))

    def packed_reading(self) -> PackedReading | None:
        box_size = getattr(self.batch_augment, "max_read_size", None)
        if box_size is None:
            return None
        return PackedReading(box_size, getattr(self.batch_augment, "read_blocks", None))
