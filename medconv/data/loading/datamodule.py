"""The data module: loaders of patches or images for training, of whole cases for validation; augmentation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning import LightningDataModule
from torch.utils.data import default_collate

from medconv.data.augmentation.sample_transforms import SampleTransforms
from medconv.data.case import Case
from medconv.data.loading.annotated import Annotated
from medconv.data.loading.image_dataset import ImageCases, ImageDataset
from medconv.data.loading.loader import Loader, init_worker
from medconv.data.loading.patch_dataset import CaseDataset, PatchDataset, Sample, SampleOrder
from medconv.data.loading.patch_shape import PatchShape
from medconv.data.loading.samplers.base import Sampler
from medconv.data.loading.worker_errors import GuardedCollate, GuardedDataset
from medconv.data.preprocessing.store import Store
from medconv.data.splits import DataSplit
from medconv.performance.step_profiler import StepProfiler
from medconv.utils.errors import Argument, ArgumentError
from medconv.utils.signals import StopRequest

Batch = dict[str, Any]
_MAX_WORKERS = 8  # by default; each has its share of memory


@dataclass(frozen=True)
class TrainingSamples:
    """How training samples are made.

    Args:
        sampler: draws the case and the corner of each sample; its indices are those of the training cases.
        patch: not used for whole images with values.
        augment: applied to training batches: on the device if it is an accelerator, else in the workers. A
            `SampleTransforms` is applied to each sample, always in the workers.
    """

    sampler: Sampler
    patch: PatchShape
    augment: Callable[[Batch], Batch] | SampleTransforms
    seed: int


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
                "persistent_workers",
                "=true needs workers, got ",
                Argument("num_workers"),
                "=0",
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
        self.augment = None if per_sample else samples.augment

    @property
    def image_level(self) -> bool:
        """Whether samples are whole images with values, not patches with label maps."""
        return self.split.train[0].values is not None

    def train_dataloader(self) -> Loader:
        order = SampleOrder(
            self.loader.samples_per_epoch,
            self.loader.batch_size,
            rank=self._rank,
            world_size=self._world_size,
        )
        collate = default_collate
        if self.augment is not None and not self._on_gpu:
            collate = _Augmenting(self.augment)
        return self._loader(
            self._training_dataset(),
            collate,
            sampler=order,
            batch_size=self.loader.batch_size,
            profiler=self.profiler,
        )

    def _training_dataset(self) -> ImageDataset | PatchDataset:
        if self.image_level:
            return ImageDataset(
                self.store,
                self.split.train,
                self.samples.sampler,
                self.samples.seed,
                self.transform,
            )
        return PatchDataset(
            self.store,
            [case.id for case in self.split.train],
            self.samples.sampler,
            self.samples.patch,
            self.samples.seed,
            annotated=self.annotated,
            read_size=self._read_size(),
            transform=self.transform,
        )

    def _read_size(self) -> Callable[[int], Sequence[int]] | None:
        """Sample number to the size to read; one size for all if batches are augmented on the device."""
        max_read_size = getattr(self.augment, "max_read_size", None)
        if self._on_gpu and max_read_size is not None:
            return _Constant(max_read_size)
        return getattr(self.augment, "read_size", None)

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
        if self.image_level and cases_of_rank:
            return self._loader(
                ImageCases(self.store, cases_of_rank),
                default_collate,
                batch_size=self.loader.batch_size,
                shuffle=False,
                stop_request=self.stop_request,
            )
        return self._loader(
            CaseDataset(self.store, cases_of_rank, self.annotated),
            _only_item,
            batch_size=1,
            shuffle=False,
            stop_request=self.stop_request,
        )

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Keep sample numbers on the host: reading them back from a device would wait for its queue."""
        if self._on_gpu and "sample" in batch:
            return {**batch, "sample": batch["sample"].tolist()}
        return batch

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if self.trainer is None or not self.trainer.training:
            return batch
        self.profiler.mark("copy_to_device")
        if not self._on_gpu:
            return batch
        batch = {**batch, "sample": torch.as_tensor(batch["sample"])}
        return self.augment(batch) if self.augment else batch

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
        cores = len(os.sched_getaffinity(0))
        half_per_device = cores // (2 * devices)
        return max(1, min(_MAX_WORKERS, half_per_device))

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    @property
    def _on_gpu(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"


class _Constant:
    """Returns one value for any sample; a class, so that `spawn` can pickle it."""

    def __init__(self, value: Sequence[int]) -> None:
        self.value = value

    def __call__(self, sample: int) -> Sequence[int]:
        return self.value


class _Augmenting:
    """Collates and augments in the worker; a class, so that `spawn` can pickle it."""

    def __init__(self, augment: Callable[[Batch], Batch]) -> None:
        self.augment = augment

    def __call__(self, samples: list[Sample]) -> Batch:
        image_shapes = {sample["image"].shape for sample in samples}
        if len(image_shapes) == 1:
            return self.augment(default_collate(samples))
        # Samples of different sizes (see `read_size`) stay lists, until augmentation makes them one size.
        batch = self.augment({key: [sample[key] for sample in samples] for key in samples[0]})
        if "annotated" in batch:
            batch = {**batch, "annotated": default_collate(batch["annotated"])}
        return batch


def _only_item(samples: list[Sample]) -> Sample:
    (item,) = samples
    return item
