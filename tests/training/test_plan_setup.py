"""medconv/training/plan_setup.py: the plan of a config, and the values that follow from the data."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import tiny
from helpers.picture_tables import SIZE, checked, pixels, write
from helpers.plans import fingerprint

from medconv import config
from medconv.data.datasets.dataset_json import auto
from medconv.data.io.raster import write_picture
from medconv.planning.limits import EarlierPlan
from medconv.training import plan_setup
from medconv.training.data_setup import build_data, prepare_data


@pytest.mark.parametrize(("gpu", "expected"), [(False, "large"), (True, "full")])
def test_without_a_limit_of_time_a_gpu_has_the_grid_of_the_images(tmp_path, gpu, expected, monkeypatch):
    monkeypatch.setattr(plan_setup, "uses_gpu", lambda accelerator: gpu)
    settings = checked(write(tmp_path / "data", 20), "plan.memory_gb=1", "trainer.max_time=null")
    assert prepare_data(settings).plan.size == expected


THICK = fingerprint([(48, 48, 9)] * 9, [(1.0, 1.0, 8.0)] * 9, classes=3)
OPEN = (
    *("data.patch_size=null", "model.channels=${derived.channels}"),
    *("model.strides=${derived.strides}", "model.kernel_size=${derived.kernel_sizes}"),
)
BEGAN = EarlierPlan("as when this run began", size="tiny")
SLICES = replace(BEGAN, takes_slices=True, slice_axis=2)


@pytest.mark.parametrize(
    ("recorded", "overrides", "dims"),
    [
        (None, ["trainer.max_time=00:00:05:00"], 3),
        (SLICES, [], 2),
        (SLICES, ["trainer.max_time=00:00:05:00", "plan.size=small"], 2),
        (SLICES, ["data.spatial_dims=3"], 3),
        (BEGAN, ["trainer.max_time=00:00:05:00"], 3),
    ],
)
def test_a_run_that_goes_on_keeps_slices_or_volumes(recorded, overrides, dims, tmp_path, dataset):
    """Also if its network was 2D, which these images would not get anew."""
    config = tiny.checked(dataset, f"data.cache_dir={tmp_path}", *OPEN, *overrides)
    found = auto(dataset)
    planned = plan_setup.make_plan(config, found, THICK, recorded)
    assert (planned.spatial_dims, planned.slice_axis) == (dims, {2: 2, 3: None}[dims])


@pytest.mark.parametrize(
    ("spacing", "fits"), [([0.5, 0.5, 0.5], True), ([0.001, 0.001, 0.001], False), ([0.0001, 0.0001], False)]
)
def test_a_grid_that_memory_cannot_hold_is_refused_with_its_case(spacing, fits, tmp_path, dataset):
    found = auto(dataset)
    shapes = [(48, 48, 9)] * len(found.cases)
    shapes[2] = (64, 48, 9)
    measured = fingerprint(shapes, [(1.0, 1.0, 8.0)] * len(shapes), classes=3)
    dims = len(spacing)
    values = ",".join(map(str, spacing))
    config = tiny.checked(
        dataset,
        f"data.cache_dir={tmp_path}",
        f"data.spacing_mm=[{values}]",
        f"data.spatial_dims={dims}",
        f"data.patch_size={[16] * dims}",  # from that of such images, a search takes a minute
    )
    message = rf"^data\.spacing_mm: case {found.cases[2].id} has 1 x 1 x 8 mm, and at .*GB; this machine has"
    with nullcontext() if fits else pytest.raises(ValueError, match=message):
        plan_setup.make_plan(config, found, measured)


@pytest.mark.parametrize(("channels", "fits"), [(1, True), (4, False)])
def test_slices_keep_their_thickness_in_the_memory_that_they_take(
    channels, fits, tmp_path, dataset, monkeypatch
):
    """Of 48 x 48 x 9 voxels, 96 x 96 x 9 of 4 bytes in each channel are 0.32 MB; thinner slices were more."""
    monkeypatch.setattr(plan_setup, "total_memory", lambda: 2**20)
    found = auto(dataset)
    measured = fingerprint(
        [(48, 48, 9)] * len(found.cases), [(1.0, 1.0, 8.0)] * len(found.cases), channels, 3
    )
    slices = ("data.spatial_dims=2", "data.spacing_mm=[0.5,0.5]", "data.patch_size=[16,16]")
    config = tiny.checked(dataset, f"data.cache_dir={tmp_path}", *slices)
    with nullcontext() if fits else pytest.raises(ValueError, match=r"at 0\.5 x 0\.5 mm 96 x 96 x 9 voxels"):
        plan_setup.make_plan(config, found, measured)


def test_the_smallest_gpu_sets_the_budget(tmp_path, monkeypatch):
    gpus = [SimpleNamespace(total_memory=gb * 2**30) for gb in (80, 16)]
    monkeypatch.setattr(plan_setup, "uses_gpu", lambda accelerator: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    settings = checked(write(tmp_path / "data"), "trainer.precision=32-true")
    assert plan_setup._memory_budget(settings, EarlierPlan("")).memory_gb == 12


@pytest.mark.parametrize(("model", "others"), [("resnet", True), ("encoder", False)])
def test_a_plan_says_if_the_network_has_channels_of_its_own(model, others, tmp_path):
    config = checked(write(tmp_path / "data", 20), f"model={model}", "plan.channels=[4,8]")
    channels = next(row for row in prepare_data(config).plan.rows if row[0] == "channels")
    assert channels[1] == "4 8" and channels[2].startswith("plan.channels")
    assert channels[2].endswith("the model has others") == others


def test_channels_of_other_stages_than_the_plan_are_refused_before_preparing(tmp_path):
    contradicting = checked(write(tmp_path / "data", 20), "model.channels=[4,8,8,8]", "plan.channels=[4,8]")
    with pytest.raises(
        config.ConfigError, match=r"the plan has 2 stages, so it must be 2 numbers; plan.channels"
    ):
        prepare_data(contradicting)


@pytest.mark.parametrize(
    ("store", "memory", "says"), [("npy", 2**21, True), ("npy", 2**30, False), ("blosc2", 2**21, False)]
)
def test_the_plan_says_that_a_compressed_store_would_pay(store, memory, says, tmp_path, dataset, monkeypatch):
    """Seven cases of 48 x 48 x 9 voxels at 0.4 of the spacing in a plane, five bytes a voxel, are 4.5 MB."""
    monkeypatch.setattr(plan_setup, "total_memory", lambda: memory)
    found = auto(dataset)
    measured = fingerprint([(48, 48, 9)] * len(found.cases), [(1.0, 1.0, 8.0)] * len(found.cases), classes=3)
    config = tiny.checked(
        dataset, f"data.cache_dir={tmp_path}", "data.spacing_mm=[0.4,0.4,8]", f"data.store={store}", *OPEN
    )
    rows = plan_setup.make_plan(config, found, measured).rows
    reasons = [reason for name, _, reason in rows if name == "store"]
    assert [("data.store=blosc2 about halves them" in reason) for reason in reasons] == [True] * says


def test_pictures_with_label_maps_are_normalised_each_by_itself(tmp_path):
    """Those with a class or a value are not, as a brightness may be what tells it: the next test."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for i in range(5):
        write_picture(tmp_path / "images" / f"{i}.png", np.diag(np.full(16, i + 1, np.uint8)))
        write_picture(tmp_path / "masks" / f"{i}.png", np.eye(16, dtype=np.uint8))
    arguments = ["data=image_mask", f"data.images={tmp_path}/images", f"data.labels={tmp_path}/masks"]
    arguments += [f"data.cache_dir={tmp_path}/cache", "data.patch_size=[16,16]", "data.prepare_workers=1"]
    earlier = replace(BEGAN, normalisation=("dataset",))
    for more, earlier_plan, expected in (
        ([], None, "zscore"),
        (["data.normalisation=dataset"], None, "dataset"),
        ([], earlier, "dataset"),
        (["data.normalisation=rescale"], earlier, "rescale"),
    ):
        settings = config.validate(tiny.composed(*arguments, *more))
        assert prepare_data(settings, earlier_plan=earlier_plan).plan.normalisation == (expected,)


def test_a_run_that_goes_on_keeps_the_normalisation_of_each_channel(tmp_path):
    root = tiny.write_dataset(tmp_path / "data", cases=4)
    settings = tiny.checked(root, f"data.cache_dir={tmp_path}/cache", "data.prepare_workers=1")
    kept = prepare_data(settings, earlier_plan=replace(BEGAN, normalisation=("rescale",))).plan
    assert kept.normalisation == ("rescale",)
    assert ("normalisation", "rescale", "as when this run began") in kept.rows
    # of a checkpoint with another number of channels
    others = prepare_data(settings, earlier_plan=replace(BEGAN, normalisation=("ct", "none"))).plan
    assert others.normalisation == ("zscore",)


@pytest.mark.parametrize(
    ("channel", "offset", "more", "expected"),
    [
        ("MRI", 0, [], "ct"),
        ("abdomen", 0, [], "ct"),
        ("zscore", 0, [], "zscore"),  # nnU-Net's word for it
        ("MRI", 1000, [], "zscore"),
        ("MRI", 0, ["data.normalisation=zscore"], "zscore"),
        ("MRI", 0, ["data.convention=nnunet_ras"], "zscore"),
    ],
)
def test_volumes_with_the_values_of_ct_are_normalised_as_ct(
    channel, offset, more, expected, tmp_path, caplog
):
    """Where no name says so: by the statistics of the foreground, and not of how much air each image shows."""
    root = tmp_path / "data"
    rng = np.random.default_rng(0)
    for i in range(4):
        image = np.full((16, 16, 16), -1000.0)
        image[3 : 10 + i, 3:13, 3:13] = 40  # organs in fat, of patients of several sizes
        label = (image == 40).astype(np.uint8)
        label[:, 8:] = 0
        image += rng.normal(0, 10, image.shape) + offset
        for folder, array in (("imagesTr", image), ("labelsTr", label)):
            (root / folder).mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(array.astype(np.float32), np.eye(4)), root / folder / f"{i}.nii.gz")
    description = {
        "modality": {"0": channel},
        "labels": {"0": "background", "1": "organ"},
        "training": [{"image": f"imagesTr/{i}.nii.gz", "label": f"labelsTr/{i}.nii.gz"} for i in range(4)],
    }
    (root / "dataset.json").write_text(json.dumps(description))
    settings = tiny.checked(root, f"data.cache_dir={tmp_path}/cache", "data.prepare_workers=1", *more)
    caplog.set_level("INFO")
    plan = prepare_data(settings).plan
    assert plan.normalisation == (expected,)
    reasons = {name: reason for name, _, reason in plan.rows}
    assert (reasons["normalisation"] == "the values are those of CT") == (expected == "ct")
    assert ("are those of CT in every case" in caplog.text) == (expected == "ct")


def test_derived_values_of_classes_and_numbers(tmp_path, caplog):
    table = write(tmp_path / "data", 20)
    write_picture(tmp_path / "data/1.png", pixels(2))  # a copy of 2
    settings = checked(table, "data.balanced_sampling=true", "data.fold=1")
    prepared = prepare_data(settings)
    derived = prepared.derived
    expected = {
        "targets": {"kind": "multiclass", "names": ["a", "b"]},
        "num_classes": 2,
        "num_channels": 1,
        "class_names": ["a", "b"],
        "patch_size": list(SIZE),
        "spatial_dims": 2,
        "normalisation": ["dataset"],
    }
    assert {key: getattr(derived, key) for key in expected} == expected
    validation = {case.id for case in prepared.val}
    assert ("1" in validation) != ("2" in validation), "else the next line tests nothing"
    assert "images of training cases are also in validation" in caplog.text
    assert len(prepared.train) + len(prepared.val) == 19
    assert derived.class_counts == [sum(c.values == (v,) for c in prepared.train) for v in (0.0, 1.0)]
    assert derived.monitor == "val/cross_entropy" and derived.num_train_cases == len(prepared.train)
    resolved = config.with_derived(settings, derived)
    resolved = replace(resolved, data=replace(resolved.data, batch_size=4, samples_per_epoch=4))
    batch = next(iter(build_data(resolved, prepared).train_dataloader()))
    assert sorted(batch["label"].flatten().tolist()) == [0, 0, 1, 1]
    numbers = prepare_data(
        checked(table, "data.target_type=regression", "data.label_columns=age", "data.fold=all")
    )
    derived = numbers.derived
    assert derived.targets["means"] == [pytest.approx(29.5)]
    assert derived.targets["stds"] == [pytest.approx(np.arange(20).std())]
    assert derived.class_counts is None and derived.num_classes == 1 and not numbers.val
