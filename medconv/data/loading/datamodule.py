"""The data module: loaders of patches or images for training, of whole cases for validation; augmentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean
from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import default_collate

from medconv.data.augmentation.sample_transforms import SampleTransforms
from medconv.data.case import Case
from medconv.data.loading.collate import Augmenting, HalfPrecision, only_item
from medconv.data.loading.loader import (
    Loader,
    SampleOrder,
    check_room,
    init_worker,
    largest_case_bytes,
    patch_bytes,
)
from medconv.data.loading.patch import Batch, PackedReading, PatchShape, Sample, collate_packed, with_boxes
from medconv.data.loading.patch_dataset import (
    Annotated,
    CaseDataset,
    ChannelDropout,
    PatchDataset,
    without_dropped,
)
from medconv.data.loading.samplers import Sampler
from medconv.data.loading.worker_errors import GuardedCollate, GuardedDataset
from medconv.data.preprocessing.store import Store, StoreCheck
from medconv.data.splits import DataSplit
from medconv.performance.step_profiler import StepProfiler
from medconv.utils.cores import num_cores
from medconv.utils.errors import Argument, ArgumentError
from medconv.utils.hardware import DeviceCopies, autocast_dtype
from medconv.utils.signals import StopRequest

_READ_ON_HOST = ("sample", "reference")
_READ_ON_HOST_OF_CASES = (*_READ_ON_HOST, "label")  # of a validation, which scores where the outputs are
_MEASURED = 16  # training samples, or cases for validation, whose sizes tell the memory that batches need
_MAX_WORKERS = 8  # by default; each has its share of memory


@dataclass(frozen=True)
class TrainingSamples:
    """How training samples are made.

    Args:
        channel_dropout: which channels they lack; None: none.
        sampler: draws the case and the corner of each sample; its indices are those of the training cases.
        patch: not used for whole images with values.
        images: of whole images with values: what makes their datasets, as `features.image_level.samples`
            does: `ImageDataset` for training, `ImageCases` for validation. None: patches with label maps.
        augment: applied to training batches: on the device if it is an accelerator, else in the workers. A
            `SampleTransforms` is applied to each sample, always in the workers.
    """

    sampler: Sampler
    patch: PatchShape
    augment: Callable[[Batch], Batch] | SampleTransforms
    seed: int
    channel_dropout: ChannelDropout | None = None
    images: Any = None


@dataclass(frozen=True)
class LoaderSettings:
    """Batches, and the processes that make them.

    Args:
        batch_size: per device.
        samples_per_epoch: over all devices.
        num_workers: loader processes per device; None: half of the cores, shared by the devices, at most 8.
        prefetch_factor: batches that each worker keeps ready.
        persistent_workers: keep workers between epochs; None: yes if there are workers.
    Raises:
        ArgumentError: a number out of range, or persistent workers without workers.
    """

    batch_size: int
    samples_per_epoch: int
    num_workers: int | None = None
    prefetch_factor: int = 2
    persistent_workers: bool | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "samples_per_epoch", "prefetch_factor"):
            number = getattr(self, name)
            if number < 1:
                raise ArgumentError(name, f" must be at least 1, got {number}")
        if self.num_workers is not None and self.num_workers < 0:
            raise ArgumentError("num_workers", f" must be 0 or more, got {self.num_workers}")
        if self.num_workers == 0 and self.persistent_workers:
            raise ArgumentError(
                "persistent_workers", "=true needs workers, got ", Argument("num_workers"), "=0"
            )


class DataModule(LightningDataModule):
    """Feeds the trainer from a store.

    Args:
        split: training cases, cases for validation, and cases for tests after training.
        annotated: of label maps: by case id, where cases lack labels.
        profiler: told when a phase of a step ends.
        stop_request: ends a validation after the case at hand.
    Raises:
        ValueError: no training case.
    """

    def __init__(
        self,
        store: Store,
        split: DataSplit,
        samples: TrainingSamples,
        loader: LoaderSettings,
        *,
        annotated: Mapping[str, Annotated] | None = None,
        profiler: StepProfiler | None = None,
        stop_request: StopRequest | None = None,
    ) -> None:
        super().__init__()
        if not split.train:
            raise ValueError("no case is left to train on")
        self.store = store
        self.split = split
        self.samples = samples
        self.loader = loader
        self.annotated = annotated
        self.profiler = profiler or StepProfiler()
        self.stop_request = stop_request or StopRequest()
        # Applied to each sample in the worker that reads it, or else to whole batches.
        per_sample = isinstance(samples.augment, SampleTransforms)
        self.transform = samples.augment if per_sample else None
        self.augment: Any = None if per_sample else samples.augment
        self._copies = DeviceCopies()
        self._check = StoreCheck(store, [case.id for case in split.train])

    def setup(self, stage: str) -> None:
        """Raises: ArgumentError: the batches that workers keep ready do not fit into shared memory."""
        entry = self.store.read(self.split.train[0].id)
        reading = self._packed_reading()
        voxels: float  # of a training sample that a worker sends
        if self.samples.images is not None:
            voxels = prod(entry.image.shape[1:])
        elif reading is not None:
            voxels = fmean(reading.blocks_of(number).voxels for number in range(_MEASURED))
        else:
            voxels = prod(self.samples.patch.size)
        batch_bytes = self.loader.batch_size * patch_bytes(entry, voxels)
        cases = [*self.split.val, *self.split.test][:_MEASURED]
        case_bytes = largest_case_bytes(self.store.read(case.id) for case in cases)
        # Batches of training and, at the same time, of validation.
        worker_bytes = self.loader.prefetch_factor * (batch_bytes + case_bytes)
        processes = self.trainer.num_devices if self.trainer is not None else 1
        check_room(worker_bytes, self._num_workers, processes)

    def teardown(self, stage: str) -> None:
        self._check.stop()

    def on_exception(self, exception: BaseException) -> None:
        self._check.stop()

    def train_dataloader(self) -> Loader:
        order = SampleOrder(
            self.loader.samples_per_epoch,
            self.loader.batch_size,
            rank=self._rank,
            world_size=self._world_size,
        )
        collate = default_collate
        if self._packed_reading() is not None:
            collate = collate_packed
        elif self.augment is not None and not self._on_gpu:
            collate = Augmenting(self.augment)
        return self._loader(
            self._training_dataset(),
            HalfPrecision(collate) if self._in_half_precision else collate,
            sampler=order,
            batch_size=self.loader.batch_size,
            profiler=self.profiler,
        )

    def _training_dataset(self) -> Any:
        if self.samples.images is not None:
            return self.samples.images.ImageDataset(
                self.store, self.split.train, self.samples.sampler, self.samples.seed, self.transform
            )
        return PatchDataset(
            self.store,
            [case.id for case in self.split.train],
            self.samples.sampler,
            self.samples.patch,
            self.samples.seed,
            annotated=self.annotated,
            read_size=getattr(self.augment, "read_size", None),
            packed=self._packed_reading(),
            channel_dropout=self.samples.channel_dropout,
            transform=self.transform,
        )

    def _packed_reading(self) -> PackedReading | None:
        """What is read for an augmentation on the device that needs more than the patch."""
        box_size = getattr(self.augment, "max_read_size", None)
        if not self._on_gpu or self.samples.images is not None or box_size is None:
            return None
        return PackedReading(box_size, getattr(self.augment, "read_blocks", None))

    def val_dataloader(self) -> Loader:
        return self._whole_cases(self.split.val)

    def test_dataloader(self) -> Loader:
        return self._whole_cases(self.split.test)

    def _whole_cases(self, cases: Sequence[Case]) -> Loader:
        """Each case on exactly one rank; ranks may have different numbers of cases. Whole images are batched.

        A rank without a case repeats the first one; it counts once, since results are stored by case id.
        """
        cases = list(cases)
        cases_of_rank = cases[self._rank :: self._world_size] or cases[:1]
        if self.samples.images is not None and cases_of_rank:
            return self._loader(
                self.samples.images.ImageCases(self.store, cases_of_rank),
                default_collate,
                batch_size=self.loader.batch_size,
                shuffle=False,
                ends_early=True,
            )
        return self._loader(
            CaseDataset(self.store, cases_of_rank, self.annotated),
            only_item,
            batch_size=1,
            shuffle=False,
            ends_early=True,
        )

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """All tensors but those that are read on the host: reading them back would wait for the device."""
        read_on_host = _READ_ON_HOST_OF_CASES if "case" in batch else _READ_ON_HOST
        copied = {
            key: value
            for key, value in batch.items()
            if isinstance(value, Tensor) and key not in read_on_host
        }
        return {**batch, **self._copies(copied, device)}

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if self.trainer is None or not self.trainer.training:
            return batch
        # Whole images are compared when they are read; the processes of a machine share the store
        if self.samples.images is None and self.trainer.local_rank == 0:
            self._check.go_on(self.trainer.global_step)
        self.profiler.mark("copy_to_device")
        if self._on_gpu:
            if self._in_half_precision:
                batch = {**batch, "image": batch["image"].float()}
            if "blocks" in batch:
                batch = with_boxes(batch, self.augment.max_read_size)
            batch = self.augment(batch) if self.augment else batch
        return without_dropped(batch) if "kept" in batch else batch

    def _loader(self, dataset: Any, collate_fn: Callable[[list[Sample]], Batch], **settings: Any) -> Loader:
        num_workers = self._num_workers
        persistent_workers = self.loader.persistent_workers
        if persistent_workers is None:
            persistent_workers = num_workers > 0
        guarded = GuardedDataset(dataset, num_workers)
        return Loader(
            guarded,
            collate_fn=GuardedCollate(collate_fn, guarded),
            num_workers=num_workers,
            # Python 3.14 would start them from another process, whose child's death torch does not see.
            multiprocessing_context="fork" if num_workers else None,
            pin_memory=self._on_gpu,
            stop_request=self.stop_request,
            prefetch_factor=self.loader.prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers,
            worker_init_fn=init_worker,
            **settings,
        )

    @property
    def _num_workers(self) -> int:
        if self.loader.num_workers is not None:
            return self.loader.num_workers
        devices = self.trainer.num_devices if self.trainer is not None else 1
        cores = num_cores()
        half_per_device = cores // (2 * devices)
        return max(1, min(_MAX_WORKERS, half_per_device))

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    @property
    def _in_half_precision(self) -> bool:
        """Whether training images are sent to the device in half precision, in which the network computes."""
        return self._on_gpu and autocast_dtype(self.trainer.precision) is not None  # type: ignore[union-attr]

    @property
    def _on_gpu(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
