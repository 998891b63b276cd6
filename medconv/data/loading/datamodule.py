"""The data module: loaders of patches or images for training, of whole cases for validation; augmentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import default_collate

from medconv.data.case import Case
from medconv.data.loading.loader import (
    Loader,
    SampleOrder,
    check_room,
    init_worker,
    largest_case_bytes,
    patch_bytes,
)
from medconv.data.loading.patch import Batch, Sample, augmented, collate_packed, in_half_precision, with_boxes
from medconv.data.loading.patch_dataset import without_dropped
from medconv.data.loading.samples import Samples
from medconv.data.loading.worker_errors import GuardedCollate, GuardedDataset
from medconv.data.preprocessing.store import Store, StoreCheck
from medconv.data.splits import DataSplit
from medconv.performance.step_profiler import StepProfiler
from medconv.utils.hardware import DeviceCopies, autocast_dtype, num_cores
from medconv.utils.signals import StopRequest

_READ_ON_HOST = ("sample", "reference")
_READ_ON_HOST_OF_CASES = (*_READ_ON_HOST, "label")  # of a validation, which scores where the outputs are
_MEASURED = 16  # cases for validation whose sizes tell the memory that batches need
_MAX_WORKERS = 8  # by default; each has its share of memory


@dataclass(frozen=True)
class LoaderSettings:
    """Batches, and the processes that make them.

    Args:
        batch_size: per device.
        samples_per_epoch: over all devices.
        num_workers: loader processes per device; None: half of the cores, shared by the devices, at most 8.
        prefetch_factor: batches that each worker keeps ready.
        persistent_workers: keep workers between epochs; None: yes if there are workers.
    """

    batch_size: int
    samples_per_epoch: int
    num_workers: int | None = None
    prefetch_factor: int = 2
    persistent_workers: bool | None = None


class _Process(NamedTuple):
    """The place of this process in the run.

    Args:
        num_workers: its loader processes.
        rank, world_size: among all processes.
        of_machine: how many processes this machine has.
        on_gpu: whether its device is one.
        sends_half: whether training images are sent to the device as fp16, whatever half precision the
            network computes in (see `patch.py`).
    """

    num_workers: int
    rank: int = 0
    world_size: int = 1
    of_machine: int = 1
    on_gpu: bool = False
    sends_half: bool = False


class DataModule(LightningDataModule):
    """Feeds the trainer from a store.

    A training batch, as `training_step` gets it: image (batch, channels, *patch) float32, label (batch, 1,
    *patch) uint8 or int16, sample (batch,) int64, which stays on the host; where configured, annotated
    (batch, outputs) bool, values (batch, values) float32, kept (batch, channels) bool. On a CPU the worker
    reads and augments it. For a GPU the worker packs what is visible: image (channels, voxels) float32 or
    float16, label (1, voxels), blocks; the rest is done there, by `on_after_batch_transfer`. Validation
    cases are items of `CaseDataset`.

    Args:
        split: training cases, cases for validation, and cases for tests after training.
        profiler: told when a phase of a step ends.
        stop_request: ends a validation after the case at hand.
    Raises:
        ValueError: no training case.
    """

    def __init__(
        self,
        store: Store,
        split: DataSplit,
        samples: Samples,
        loader: LoaderSettings,
        *,
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
        self.profiler = profiler or StepProfiler()
        self.stop_request = stop_request or StopRequest()
        self._copies = DeviceCopies()
        self._check = StoreCheck(store, [case.id for case in split.train])

    def setup(self, stage: str) -> None:
        """Raises: ValueError: no room for batches in shared memory, or a trainer that divides samples."""
        connector = getattr(self.trainer, "_accelerator_connector", None)
        if connector is not None and connector.use_distributed_sampler and connector.is_distributed:
            raise ValueError(
                "lightning.Trainer needs use_distributed_sampler=False: the loaders of medconv divide "
                "samples and cases among processes themselves"
            )
        process = self._process()
        if not process.num_workers:  # no batch travels
            return
        entry = self.store.read(self.split.train[0].id)
        packed = self.samples.packed_reading() if process.on_gpu else None
        voxels = self.samples.voxels(entry, packed)
        batch_bytes = self.loader.batch_size * patch_bytes(entry, voxels)
        cases = [*self.split.val, *self.split.test][:_MEASURED]
        case_bytes = largest_case_bytes(self.store.read(case.id) for case in cases)
        # Batches of training and, at the same time, of validation.
        worker_bytes = self.loader.prefetch_factor * (batch_bytes + case_bytes)
        check_room(worker_bytes, process.num_workers, process.of_machine)

    def teardown(self, stage: str) -> None:
        self._check.stop()

    def on_exception(self, exception: BaseException) -> None:
        self._check.stop()

    def train_dataloader(self) -> Loader:
        process = self._process()
        samples = self.samples
        packed = samples.packed_reading() if process.on_gpu else None
        # A batch is augmented on the device if that is an accelerator, else in the worker
        collate: Callable[[list[Sample]], Batch] = default_collate
        if packed is not None:
            collate = collate_packed
        elif samples.batch_augment is not None and not process.on_gpu:
            collate = partial(augmented, samples.batch_augment)
        if process.sends_half:
            collate = partial(in_half_precision, collate)
        dataset = samples.training(self.store, self.split.train, packed)
        batch_size = self.loader.batch_size
        order = SampleOrder(self.loader.samples_per_epoch, batch_size, process.rank, process.world_size)
        return self._loader(dataset, collate, sampler=order, batch_size=batch_size, profiler=self.profiler)

    def val_dataloader(self) -> Loader:
        return self._whole_cases(self.split.val)

    def test_dataloader(self) -> Loader:
        return self._whole_cases(self.split.test)

    @property
    def validates_batches(self) -> bool:
        """As of `Samples`."""
        return self.samples.validates_batches

    def _whole_cases(self, cases: Sequence[Case]) -> Loader:
        """Each case on exactly one rank; ranks may have different numbers of cases. Whole images are batched.

        A rank without a case repeats the first one; it counts once, since results are stored by case id.
        """
        process = self._process()
        of_rank = list(cases[process.rank :: process.world_size] or cases[:1])
        dataset = self.samples.validation(self.store, of_rank) if of_rank else ()
        batching: dict[str, Any] = {"collate": itemgetter(0), "batch_size": 1}  # the case itself
        if self.samples.validates_batches:
            batching = {"collate": default_collate, "batch_size": self.loader.batch_size}
        return self._loader(dataset, **batching, shuffle=False, ends_early=True)

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
        # The processes of a machine share the store
        if not self.samples.verifies and self.trainer.local_rank == 0:
            self._check.go_on(self.trainer.global_step)
        self.profiler.mark("copy_to_device")
        process = self._process()
        augment = self.samples.batch_augment
        if process.on_gpu:
            if process.sends_half:
                batch = {**batch, "image": batch["image"].float()}
            if "blocks" in batch:
                batch = with_boxes(batch, augment.max_read_size)
            batch = augment(batch) if augment else batch
        return without_dropped(batch) if "kept" in batch else batch

    def _loader(self, dataset: Any, collate: Callable[[list[Sample]], Batch], **settings: Any) -> Loader:
        process = self._process()
        num_workers = process.num_workers
        persistent_workers = self.loader.persistent_workers
        if persistent_workers is None:
            persistent_workers = num_workers > 0
        guarded = GuardedDataset(dataset, num_workers)
        return Loader(
            guarded,
            collate_fn=GuardedCollate(collate, guarded),
            num_workers=num_workers,
            # Python 3.14 would start them from another process, whose child's death torch does not see.
            multiprocessing_context="fork" if num_workers else None,
            pin_memory=process.on_gpu,
            stop_request=self.stop_request,
            prefetch_factor=self.loader.prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers,
            worker_init_fn=init_worker,
            **settings,
        )

    def _process(self) -> _Process:
        num_workers = self.loader.num_workers
        if num_workers is None:
            devices = self.trainer.num_devices if self.trainer is not None else 1
            num_workers = max(1, min(_MAX_WORKERS, num_cores() // (2 * devices)))
        if self.trainer is None:
            return _Process(num_workers)
        on_gpu = self.trainer.strategy.root_device.type == "cuda"
        return _Process(
            num_workers=num_workers,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            of_machine=self.trainer.num_devices,
            on_gpu=on_gpu,
            sends_half=on_gpu and autocast_dtype(self.trainer.precision) is not None,
        )
