"""The data module: loaders of patches or images for training, of whole cases for validation; augmentation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning import LightningDataModule
from torch.utils.data import default_collate

from medconv.data.augmentation.sample_transforms import SampleTransforms
from medconv.data.case import Case
from medconv.data.loading.image_dataset import ImageCases, ImageDataset
from medconv.data.loading.loader import Loader, init_worker
from medconv.data.loading.patch_dataset import Annotated, CaseDataset, PatchDataset, Sample, SampleOrder
from medconv.data.loading.worker_errors import GuardedCollate, GuardedDataset
from medconv.data.preprocessing.store import Store
from medconv.performance.step_profiler import StepProfiler
from medconv.utils.signals import StopRequest

Batch = dict[str, Any]


class DataModule(LightningDataModule):
    """Feeds the trainer from a store.

    Args:
        batch_size: per device. samples_per_epoch: over all devices.
        augment: applied to training batches: on the device if it is an accelerator, else in the workers. A
            `SampleTransforms` is applied to each sample, always in the workers.
        slice_axis: with 2D patches from volumes, the axis across the slices.
        draw_from: indices into `train`, per class, to draw each class equally often (of label maps, where a
            patch is centred on a foreground voxel); None draws each case by its weight.
        annotated: of label maps: by case id, where cases lack labels.
        test: cases for `trainer.test`.
        num_workers: loader processes per device; None: half of the cores, shared by the devices, at most 8.
        persistent_workers: keep workers between epochs; None: yes if there are workers.
        profiler: told when a phase of a step ends. stop_request: ends a validation after the case at hand.
    Raises: ValueError: no training case, or inconsistent values.
    """

    def __init__(
        self,
        store: Store,
        train: Sequence[Case],
        val: Sequence[Case],
        patch_size: Sequence[int],
        augment: Callable[[Batch], Batch] | SampleTransforms,
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
        annotated: Mapping[str, Annotated] | None = None,
        test: Sequence[Case] = (),
        profiler: StepProfiler | None = None,
        stop_request: StopRequest | None = None,
    ) -> None:
        super().__init__()
        self.store, self.train_cases, self.val_cases, self.patch_size = store, train, val, patch_size
        self.test_cases = test
        self.transform = augment if isinstance(augment, SampleTransforms) else None
        self.augment = None if isinstance(augment, SampleTransforms) else augment
        self.seed, self.batch_size = seed, batch_size
        self.samples_per_epoch, self.oversample_foreground = samples_per_epoch, oversample_foreground
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self.persistent_workers = persistent_workers
        self.slice_axis, self.draw_from, self.annotated = slice_axis, draw_from, annotated
        self.profiler, self.stop_request = profiler or StepProfiler(), stop_request or StopRequest()
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
            raise ValueError("data.persistent_workers=true needs workers, got data.num_workers=0")

    def train_dataloader(self) -> Loader:
        dataset = self._samples()
        order = SampleOrder(self.samples_per_epoch, self.batch_size, self._rank, self._world_size)
        collate = _Augmenting(self.augment) if self.augment and not self._on_gpu else default_collate
        return self._loader(
            dataset, collate, sampler=order, batch_size=self.batch_size, profiler=self.profiler
        )

    def _samples(self) -> ImageDataset | PatchDataset:
        given = [case.weight for case in self.train_cases]
        weights = None if len(set(given)) == 1 else given
        if self.image_level:
            sampling = self.draw_from, self.transform, weights
            return ImageDataset(self.store, self.train_cases, self.seed, *sampling)
        ids, share = [case.id for case in self.train_cases], self.oversample_foreground
        place = self.slice_axis, self._read_size()
        return PatchDataset(
            *(self.store, ids, self.patch_size, self.seed, share, *place, self.transform),
            weights=weights,
            draw_from=self.draw_from,
            annotated=self.annotated,
        )

    @property
    def image_level(self) -> bool:
        """Whether samples are whole images with values, not patches with label maps."""
        return self.train_cases[0].values is not None

    def _read_size(self) -> Callable[[int], Sequence[int]] | None:
        """Sample number to the size to read; one size for all if batches are augmented on the device."""
        if self._on_gpu and (largest := getattr(self.augment, "max_read_size", None)) is not None:
            return _Constant(largest)
        return getattr(self.augment, "read_size", None)

    def val_dataloader(self) -> Loader:
        return self._whole_cases(self.val_cases)

    def test_dataloader(self) -> Loader:
        return self._whole_cases(self.test_cases)

    def _whole_cases(self, cases: Sequence[Case]) -> Loader:
        """Each case on exactly one rank; ranks may have different numbers of cases. Whole images are batched.

        A rank without a case repeats the first one; it counts once, since results are stored by case id.
        """
        cases = list(cases)
        mine = cases[self._rank :: self._world_size] or cases[:1]
        dataset: Any
        if self.image_level and mine:
            dataset, collate, size = ImageCases(self.store, mine), default_collate, self.batch_size
        else:
            dataset, collate, size = CaseDataset(self.store, mine, self.annotated), _only_item, 1
        return self._loader(dataset, collate, batch_size=size, shuffle=False, stop_request=self.stop_request)

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
        workers = self._workers
        guarded = GuardedDataset(dataset, workers)
        return Loader(
            guarded,
            collate_fn=GuardedCollate(collate_fn, guarded),
            num_workers=workers,
            # Python 3.14 would start them from another process, whose child's death torch does not see
            multiprocessing_context="fork" if workers else None,
            pin_memory=self._on_gpu,
            prefetch_factor=self.prefetch_factor if workers else None,
            persistent_workers=workers > 0 if self.persistent_workers is None else self.persistent_workers,
            worker_init_fn=init_worker,
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
        if len({sample["image"].shape for sample in samples}) == 1:
            return self.augment(default_collate(samples))
        # Samples of different sizes, see `read_size`
        batch = self.augment({key: [sample[key] for sample in samples] for key in samples[0]})
        known = {"annotated": default_collate(batch["annotated"])} if "annotated" in batch else {}
        return {**batch, **known}


def _only_item(samples: list[Sample]) -> Sample:
    (item,) = samples
    return item
