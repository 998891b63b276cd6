"""medconv/data/loading/datamodule.py: batches from real workers, what a worker costs, and invalid values."""

import gc
import multiprocessing
import os
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers.loading import cases_of, data_module, training_cases
from helpers.volumes import preprocessing_config, tiny
from threadpoolctl import threadpool_info, threadpool_limits
from torch.utils.data import default_collate

from benchmarks.workers import measured
from medconv.data.augmentation.augment import Augment
from medconv.data.case import Case
from medconv.data.loading.patch import PackedReading, PatchShape, collate_packed
from medconv.data.loading.patch_dataset import PatchDataset
from medconv.data.loading.samplers import ForegroundSampler
from medconv.data.preprocessing.dataset_cache import fill_store
from medconv.data.preprocessing.preprocess import Entry
from medconv.utils.errors import ArgumentError

CONF = Path(__file__).parents[3] / "conf" / "augmentation"
PATCH = (6, 5, 4)
SLACK_MB = 12.0  # by which two workers that do the same may differ


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datamodule")
    dataset = tiny(folder / "data", 4)
    return dataset, fill_store(dataset, preprocessing_config(), folder / "cache", 1)


def add_100(batch):
    return {**batch, "image": batch["image"] + 100}


def module(prepared, augment=add_100, **changes):
    dataset, store = prepared
    settings = {
        "train": dataset.cases[:3],
        "val": dataset.cases[3:],
        "batch_size": 2,
        "samples_per_epoch": 6,
        "num_workers": 0,
    }
    settings.update(changes)
    return data_module(store, settings.pop("train"), settings.pop("val"), PATCH, augment, **settings)


def pretend_trainer(device="cpu", rank=0, world_size=1, training=True, precision="32-true"):
    return SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device(device)),
        local_rank=0,
        global_step=0,
        global_rank=rank,
        world_size=world_size,
        num_devices=world_size,
        training=training,
        precision=precision,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_training_batches_are_plain_tensors(prepared, workers):
    """MONAI's MetaTensor costs time in every operation."""
    data = module(
        prepared, Augment(0, (1, 1.5, 2), PATCH, p={"rotation": 1, "noise": 1}), num_workers=workers
    )
    loader = data.train_dataloader()
    assert len(loader) == 3 and loader.persistent_workers == (workers > 0)
    for batch in loader:
        assert set(batch) == {"image", "label", "sample"}
        assert all(type(value) is torch.Tensor for value in batch.values())
        assert batch["image"].shape == batch["label"].shape == (2, 1, *PATCH)
        assert [batch[key].dtype for key in ("image", "label", "sample")] == [
            torch.float32,
            torch.uint8,
            torch.int64,
        ]


def test_workers_do_not_change_the_batches(prepared):
    augment = Augment(0, (1, 1.5, 2), PATCH, p={"rotation": 0.5, "noise": 1, "brightness": 1})
    without_workers, with_workers = (
        list(module(prepared, augment, num_workers=n).train_dataloader()) for n in (0, 2)
    )
    assert len(without_workers) == 3
    for one, other in zip(without_workers, with_workers, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


class BrighterSamples:
    """An augmentation of single samples."""

    per_sample = True

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "image": sample["image"] + 100}


def test_samples_are_transformed_in_workers_even_if_there_is_an_accelerator(prepared):
    data = module(prepared, BrighterSamples())
    data.trainer = pretend_trainer("cuda")
    loader = data.train_dataloader()
    batch = loader.collate_fn([loader.dataset[i] for i in (0, 1)])
    assert batch["image"].min() > 50
    after = data.on_after_batch_transfer(batch, 0)
    assert after["image"] is batch["image"] and torch.equal(after["sample"], torch.tensor([0, 1]))


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_cases_are_whole_and_not_augmented(prepared, workers):
    loader = module(prepared, num_workers=workers).val_dataloader()
    (item,) = list(loader)
    assert item["case"] == "case_3"
    assert all(type(item[key]) is torch.Tensor for key in ("image", "label", "reference"))
    assert item["image"].shape == (1, 1, 12, 14, 10) and item["reference"].shape == (12, 14, 10)
    assert item["image"].max() < 50


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_case(tmp_path, workers):
    dataset = tiny(tmp_path / "data", 2)
    store = fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    (store.folder / "case_1.image.npy").write_bytes(b"")
    data = module((dataset, store), train=dataset.cases, val=dataset.cases, num_workers=workers)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        with pytest.raises(
            ValueError, match=r"case case_1 \(\w+.*\): its prepared files in .* cannot be read"
        ):
            list(loader)
        if workers:
            # as the trainer does; the garbage collector would take 10 seconds
            loader._iterator._shutdown_workers()


def test_workers_augment_if_there_is_no_accelerator(prepared):
    data = module(prepared)
    for trainer in (None, pretend_trainer("cpu")):
        data.trainer = trainer
        batch = next(iter(data.train_dataloader()))
        assert batch["image"].min() > 100
        assert data.on_after_batch_transfer(batch, 0) is batch


def test_the_accelerator_augments_if_there_is_one(prepared):
    data = module(prepared)
    data.trainer = pretend_trainer("cuda")
    loader = data.train_dataloader()
    assert loader.pin_memory
    (batch, *_) = (loader.collate_fn([loader.dataset[i] for i in (0, 1)]),)
    assert batch["image"].max() < 50
    assert data.on_after_batch_transfer(batch, 0)["image"].min() > 100
    data.trainer = pretend_trainer("cuda", training=False)
    assert data.on_after_batch_transfer(batch, 0) is batch


@pytest.mark.parametrize("shape", [PatchShape(PATCH), PatchShape(PATCH[:2], 2)])
def test_packed_samples_give_the_batch_of_whole_boxes(prepared, shape):
    """What an accelerator gets, and what it would get if all that may be shown were read."""
    size = shape.size
    augment = Augment(0, (1, 1.5, 2)[: len(size)], size, p=dict.fromkeys(("rotation", "scale", "noise"), 0.7))
    data = module(prepared, augment, batch_size=4)
    data.samples = replace(data.samples, patch=shape)
    if shape.slice_axis is not None:
        cases = training_cases(prepared[0].cases[:3], size, shape.slice_axis)
        data.samples = replace(data.samples, sampler=ForegroundSampler(cases, 0.5))
    data.trainer = pretend_trainer("cuda")
    loader = data.train_dataloader()
    batch = loader.collate_fn([loader.dataset[i] for i in range(4)])
    found = data.on_after_batch_transfer(batch, 0)
    patches = loader.dataset.dataset
    patches.packed = None
    patches.read_size = lambda sample: augment.max_read_size
    whole = augment(default_collate([patches[i] for i in range(4)]))
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], whole[key]) for key in whole)


@pytest.mark.parametrize("reads_boxes", [True, False])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_images_go_to_an_accelerator_in_half_precision(prepared, precision, reads_boxes):
    """Three bytes a voxel where fp32 has five, in a batch as workers send it; what differs is rounding."""
    augment = Augment(0, (1, 1.5, 2), PATCH, p={"rotation": 1}) if reads_boxes else add_100
    sent = {}
    given = {}
    for chosen in ("32-true", precision):
        data = module(prepared, augment)
        data.trainer = pretend_trainer("cuda", precision=chosen)
        loader = data.train_dataloader()
        batch = loader.collate_fn([loader.dataset[number] for number in (0, 1)])
        voxels = batch["label"].numel()
        sent[chosen] = (batch["image"].nbytes + batch["label"].nbytes) / voxels
        given[chosen] = data.on_after_batch_transfer(batch, 0)["image"]
        assert given[chosen].dtype == torch.float32
    assert sent == {"32-true": 5, precision: 3}
    largest = max(float(given["32-true"].abs().max()), 1.0)
    difference = float((given["32-true"] - given[precision]).abs().max())
    assert 0 < difference <= largest * 2**-11


def test_types_of_other_precisions_are_kept(prepared):
    """Lightning gives these before the copy: fp64 for `64-true`, fp16 for `16-true`."""
    data = module(prepared)
    batch = next(iter(module(prepared, num_workers=0).train_dataloader()))
    for precision, dtype in (("64-true", torch.float64), ("16-true", torch.float16)):
        data.trainer = pretend_trainer("cuda", precision=precision)
        typed = {**batch, "image": batch["image"].to(dtype)}
        assert data.on_after_batch_transfer(typed, 0)["image"].dtype == dtype


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("preset", ["light", "strong"])
def test_an_accelerator_is_sent_little_more_than_the_patch(tmp_path, axes, preset):
    """Bytes of a batch over those of its patches; `max_read_size` is 3 and 5 times the patch."""
    shape = (300, 300, 4) if axes == 2 else (160, 160, 160)
    patch = PatchShape((224, 224), 2) if axes == 2 else PatchShape((96, 96, 96))
    settings = yaml.safe_load((CONF / f"{preset}.yaml").read_text())
    del settings["_target_"]
    augment = Augment(0, (1,) * axes, patch.size, **settings)
    image = np.zeros((1, *shape), np.float32)
    entry = Entry(image, image[0].astype(np.uint8), np.zeros((1, 4), np.int32), None)
    store = SimpleNamespace(read=lambda case_id: entry)
    samples = PatchDataset(
        store,
        ["case"],
        ForegroundSampler(training_cases(cases_of(["case"]), patch.size, patch.slice_axis), 0),
        patch,
        packed=PackedReading(augment.max_read_size, augment.read_blocks),
    )
    batch = collate_packed([samples[number] for number in range(16)])
    sent = sum(batch[key].nbytes for key in ("image", "label", "blocks"))
    assert sent < 1.4 * 16 * (4 + 1) * prod(patch.size)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_read_on_the_host_is_not_copied_to_the_device(prepared, workers):
    data, meta = module(prepared, num_workers=workers), torch.device("meta")
    batch = next(iter(data.train_dataloader()))
    copied = data.transfer_batch_to_device(batch, meta, 0)
    assert copied["image"].device == copied["label"].device == meta
    assert torch.equal(copied["sample"], batch["sample"])
    case = next(iter(data.val_dataloader()))
    copied = data.transfer_batch_to_device(case, meta, 0)
    assert copied["image"].device == meta
    # The logits may be on the host: a label is compared where they are
    assert copied["label"] is case["label"]
    assert copied["reference"] is case["reference"] and copied["case"] == "case_3"


def test_workers_need_shared_memory_for_their_batches(prepared, monkeypatch):
    """As in a container with 64 kB; the error comes before a worker starts."""
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_bavail=16, f_frsize=4096))
    data = module(prepared, Augment(0, (1, 1.5, 2), PATCH, p={"rotation": 1}), batch_size=64, num_workers=2)
    message = r"num_workers=2: the batches that they keep ready need about 0 MB in /dev/shm.*--shm-size=1g"
    for trainer in (None, pretend_trainer("cuda", world_size=2)):
        data.trainer = trainer
        with pytest.raises(ArgumentError, match=message if trainer is None else "in each of 2 processes"):
            data.setup("fit")
    module(prepared, num_workers=0).setup("fit")
    few = {"batch_size": 1, "num_workers": 1}
    module(prepared, **few, val=[]).setup("fit")
    # whole cases for validation travel, too
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_bavail=4, f_frsize=4096))
    module(prepared, **few, val=[]).setup("fit")
    with pytest.raises(ArgumentError, match="num_workers=1: the batches"):
        module(prepared, **few).setup("fit")


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_validation_case_is_on_one_rank(prepared, world_size):
    """Ranks beyond the number of cases repeat the first case, so that none is missing in a collective."""
    data = module(prepared, val=prepared[0].cases)
    ranks = []
    for rank in range(world_size):
        data.trainer = pretend_trainer(rank=rank, world_size=world_size)
        ranks.append([item["case"] for item in data.val_dataloader()])
    assert all(ranks)
    cases = [case for rank in ranks[:4] for case in rank]
    assert sorted(cases) == ["case_0", "case_1", "case_2", "case_3"]
    assert ranks[4:] == [["case_0"]] * (world_size - 4)


def test_loader_without_validation_cases_is_empty(prepared):
    assert list(module(prepared, val=[]).val_dataloader()) == []


def test_ranks_share_the_training_samples(prepared):
    data, numbers = module(prepared), []
    for rank in (0, 1):
        data.trainer = pretend_trainer(rank=rank, world_size=2)
        numbers.append([batch["sample"].tolist() for batch in data.train_dataloader()])
    assert numbers == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_number_of_workers_follows_the_machine(prepared, monkeypatch):
    data = module(prepared, num_workers=None)
    for cores, devices, workers in ((1, 1, 1), (8, 1, 4), (64, 1, 8), (64, 8, 4), (4, 4, 1)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, n=cores: set(range(n)))
        data.trainer = pretend_trainer(world_size=devices)
        assert data.train_dataloader().num_workers == workers


def test_loader_gets_the_settings(prepared):
    loader = module(prepared, num_workers=2, prefetch_factor=3, persistent_workers=False).train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, False)


def collect_garbage(batch):
    """The worst case for shared memory: a collection after each batch."""
    gc.collect()
    return batch


def count_threads(batch):
    threads = max(torch.get_num_threads(), *(library["num_threads"] for library in threadpool_info()))
    return {"sample": batch["sample"], "threads": torch.tensor(threads)}


def private_megabytes(prepared, num_cases, num_workers):
    """The largest private memory of a worker."""
    cases = [
        Case(f"case_{i % 4}", (Path(f"images/{i}.nii.gz"),), Path(f"labels/{i}.nii.gz"))
        for i in range(num_cases)
    ]
    data = module(
        prepared, collect_garbage, train=cases, val=[], samples_per_epoch=400, num_workers=num_workers
    )
    workers = measured(data.train_dataloader(), 10 * num_workers, settle_seconds=0.2)
    assert len(workers) == num_workers
    return max(worker["private_MB"] for worker in workers)


def test_worker_has_one_thread(prepared):
    """Even if the main process has more; also in the libraries of numpy and scipy."""
    with threadpool_limits(2):
        batch = next(iter(module(prepared, count_threads, num_workers=1).train_dataloader()))
    assert batch["threads"] == 1


def name_parent(batch):
    return {"sample": batch["sample"], "parent": torch.tensor(os.getppid())}


def test_workers_are_forked_from_this_process(prepared):
    """Even if the default is to start them from another process, as in Python 3.14: torch sees only the
    deaths of this process's children.
    """
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        batch = next(iter(module(prepared, name_parent, num_workers=1).train_dataloader()))
    finally:
        multiprocessing.set_start_method(None, force=True)
    assert batch["parent"] == os.getpid()


def test_worker_memory_does_not_grow_with_the_dataset(prepared):
    few, many = private_megabytes(prepared, 4, 1), private_megabytes(prepared, 60_000, 1)
    assert many < few + SLACK_MB, f"{few:.0f} MB with 4 cases, {many:.0f} MB with 60,000"


def test_worker_memory_does_not_grow_with_the_number_of_workers(prepared):
    one, four = private_megabytes(prepared, 4, 1), private_megabytes(prepared, 4, 4)
    assert four < one + SLACK_MB, f"{one:.0f} MB alone, {four:.0f} MB among four"


def test_data_without_a_training_case_is_refused(prepared):
    with pytest.raises(ValueError, match="no case is left to train on"):
        module(prepared, train=[])
