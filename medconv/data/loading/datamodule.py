"""The loaders: patches for training, whole cases for validation, workers, pinned memory, augmentation."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from lightning import LightningDataModule
from monai.data import DataLoader
from threadpoolctl import threadpool_limits
from torch.utils.data import default_collate

from medconv.data.case import Case
from medconv.data.loading.image_dataset import ImageCases, ImageDataset
from medconv.data.loading.patch_dataset import CaseDataset, PatchDataset, Sample, SampleOrder
from medconv.data.loading.worker_errors import Fault, Guarded, GuardedCollate
from medconv.data.preprocessing.store import Store

Batch = dict[str, Any]
_TOLD = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
}  # by a terminal, by Slurm: to all processes of a run at once
_DYING = 2.0  # seconds for a worker to be gone once its connection is


class DataModule(LightningDataModule):
    """Feeds the trainer from a store.

    Args:
        batch_size: per device. samples_per_epoch: over all devices.
        augment: called with a training batch: on the device where that is an accelerator, else inside the
            workers.
        slice_axis: where the patches are 2D and the cases volumes, the axis across the slices.
        draw_from: of whole images, which are those whose cases have values: places in `train`, class by
            class, so that each class is drawn equally often; None draws each case so.
        num_workers: loader processes per device; None is half of the cores, shared by the devices, at most 8.
        persistent_workers: keep them between epochs; None is yes wherever there are workers.
    Raises: ValueError: no training case, or values that do not fit together.
    """

    def __init__(
        self,
        store: Store,
        train: Sequence[Case],
        val: Sequence[Case],
        patch_size: Sequence[int],
        augment: Callable[[Batch], Batch],
        *,
        seed: int,
        batch_size: int,
        samples_per_epoch: int,
        oversample_foreground: float,
        num_workers: int | None = None,
        prefetch_factor: int = 2,
        persistent_workers: bool | None = None,
        slice_axis: int | None = None,
        draw_from: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        self.store, self.train_cases, self.val_cases, self.patch_size = store, train, val, patch_size
        self.augment, self.seed, self.batch_size = augment, seed, batch_size
        self.samples_per_epoch, self.oversample_foreground = samples_per_epoch, oversample_foreground
        self.num_workers, self.prefetch_factor, self.persistent_workers = (
            num_workers,
            prefetch_factor,
            persistent_workers,
        )
        self.slice_axis, self.draw_from = slice_axis, draw_from
        self.mark: Callable[[str], None] = lambda phase: (
            None
        )  # a profiler's: called with the part of a step that ends
        self.stopped: Callable[[], bool] = lambda: (
            False
        )  # whether the run is to end, so that no further case is validated
        self._check()

    def _check(self) -> None:
        if not self.train_cases:
            raise ValueError("no case is left to train on")
        for key in ("batch_size", "samples_per_epoch", "prefetch_factor"):
            if getattr(self, key) < 1:
                raise ValueError(f"data.{key} must be at least 1, got {getattr(self, key)}")
        if self.num_workers is not None and self.num_workers < 0:
            raise ValueError(f"data.num_workers must be 0 or more, got {self.num_workers}")
        if not 0 <= self.oversample_foreground <= 1:
            raise ValueError(
                f"data.oversample_foreground must lie between 0 and 1, got {self.oversample_foreground}"
            )
        if self.num_workers == 0 and self.persistent_workers:
            raise ValueError(
                "data.persistent_workers=true needs workers that persist, got data.num_workers=0"
            )

    def train_dataloader(self) -> DataLoader:
        dataset = self._samples()
        order = SampleOrder(self.samples_per_epoch, self.batch_size, self._rank, self._world_size)
        collate = default_collate if self._augments_on_device else _Augmenting(self.augment)
        loader = self._loader(dataset, sampler=order, batch_size=self.batch_size, collate_fn=collate)
        loader.mark = lambda phase: self.mark(phase)  # whose it is by then
        return loader

    def _samples(self) -> ImageDataset | PatchDataset:
        if self.whole:
            return ImageDataset(self.store, self.train_cases, self.seed, self.draw_from)
        ids = [case.id for case in self.train_cases]
        return PatchDataset(
            self.store,
            ids,
            self.patch_size,
            self.seed,
            self.oversample_foreground,
            self.slice_axis,
            self._read_size(),
        )

    @property
    def whole(self) -> bool:
        """Whether samples are whole images with values, not patches with label maps."""
        return self.train_cases[0].values is not None

    def _read_size(self) -> Callable[[int], Sequence[int]] | None:
        """What the augmentation wants to see of a sample; one size for all where a batch is copied to a
        device first.
        """
        if self._augments_on_device and hasattr(self.augment, "max_read_size"):
            return _Always(self.augment.max_read_size)
        return getattr(self.augment, "read_size", None)

    def val_dataloader(self) -> DataLoader:
        """Each case on exactly one rank; ranks may have different numbers of them. Whole images come in
        batches.

        A rank that would have none repeats the first, which counts once all the same: results are kept by
        case id.
        """
        cases = list(self.val_cases)
        mine = cases[self._rank :: self._world_size] or cases[:1]
        if self.whole and mine:
            loader = self._loader(
                ImageCases(self.store, mine),
                batch_size=self.batch_size,
                shuffle=False,
                collate_fn=default_collate,
            )
        else:
            loader = self._loader(
                CaseDataset(self.store, mine), batch_size=1, shuffle=False, collate_fn=_only_item
            )
        loader.stopped = lambda: self.stopped()
        return loader

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Sample numbers stay here: to read them back from a device would wait for all that it has in
        work.
        """
        return (
            {**batch, "sample": batch["sample"].tolist()}
            if self._augments_on_device and "sample" in batch
            else batch
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if self.trainer is not None and self.trainer.training:
            self.mark("copy_to_device")
        if self._augments_on_device and self.trainer is not None and self.trainer.training:
            return self.augment(batch)
        return batch

    def _loader(self, dataset: Any, collate_fn: Callable[[list[Sample]], Batch], **settings: Any) -> _Loader:
        workers = self._workers
        guarded = Guarded(dataset, workers)
        return _Loader(
            guarded,
            collate_fn=GuardedCollate(collate_fn, guarded),
            num_workers=workers,
            pin_memory=self._augments_on_device,
            prefetch_factor=self.prefetch_factor if workers else None,
            persistent_workers=workers > 0 if self.persistent_workers is None else self.persistent_workers,
            worker_init_fn=_settle,
            **settings,
        )

    @property
    def _workers(self) -> int:
        if self.num_workers is not None:
            return self.num_workers
        local = self.trainer.num_devices if self.trainer is not None else 1
        return max(1, min(8, len(os.sched_getaffinity(0)) // (2 * local)))

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    @property
    def _augments_on_device(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"


class _Loader(DataLoader):
    """Says when it begins to wait for a batch, and when it has one; raises what went wrong in making it."""

    mark: Callable[[str], None] | None = None
    stopped: Callable[[], bool] | None = None  # asked before each batch: whether to end here

    def begin_at(self, batch: int) -> None:
        """The next epoch begins at this batch of it; those before are not made. Where iteration has begun
        it is too late.
        """
        self.sampler.first_batch = batch  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        with _deaf():
            batches = super().__iter__()
        self.dataset.processes = getattr(batches, "_workers", ())  # type: ignore[attr-defined]
        while self.stopped is None or not self.stopped():
            if self.mark is not None:
                self.mark("logging")
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (ConnectionError, EOFError):  # a worker ended while it handed over a batch
                time.sleep(
                    _DYING
                )  # its end is noticed by a signal, and torch's handler raises which one it was
                raise
            if self.mark is not None:
                self.mark("data_wait")
            if isinstance(batch, Fault):
                raise batch.error()
            yield batch


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes started inside never hear what is said to the run, in none of their threads: a mask is
    inherited.

    Blocked later, in the worker, it would not hold for the threads that libraries have begun by then.
    """
    # `spawn` starts it first otherwise, and then takes SIGTERM off the mask
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Always:
    """A function that gives the same for any sample; a class, so that `spawn` can send it to a worker."""

    def __init__(self, value: Sequence[int]) -> None:
        self.value = value

    def __call__(self, sample: int) -> Sequence[int]:
        return self.value


class _Augmenting:
    """Collates and augments in the worker; a class, so that `spawn` can send it there."""

    def __init__(self, augment: Callable[[Batch], Batch]) -> None:
        self.augment = augment

    def __call__(self, samples: list[Sample]) -> Batch:
        if len({sample["image"].shape for sample in samples}) == 1:
            return self.augment(default_collate(samples))
        return self.augment(
            {key: [sample[key] for sample in samples] for key in samples[0]}
        )  # sizes as read_size says


def _only_item(samples: list[Sample]) -> Sample:
    (item,) = samples
    return item


def _settle(worker: int) -> None:
    """One thread for each worker, also in numpy and scipy, and no garbage collection of what came from the
    main process.

    A collection writes into every object that it looks at, and so would copy all of them into each worker.
    Signals to the run, which a terminal and Slurm also send to its workers, are heeded by the main process,
    which still needs them then.
    """
    threadpool_limits(1)  # torch's own threads are capped by its worker loop
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """SIGTERM from the main process, which so ends a worker that hangs, is obeyed; from anybody else it is
    not.

    Workers also end when the main process is gone, which torch finds out only where it started them itself.
    """
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        told = signal.sigtimedwait({signal.SIGTERM}, 5.0)
        if told is not None and told.si_pid == parent.pid:
            break
    os._exit(0)
