"""Image-level data: preprocessed to one size, stored, sampled, augmented, loaded."""

import logging
import os
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.loading import cases_of, data_module, training_cases
from helpers.picture_tables import COUNT, SIZE, pixels, write
from helpers.volumes import image_array
from helpers.volumes import save as save_volume

from medconv.data.augmentation.augment import Augment
from medconv.data.case import Case, Dataset, Grid
from medconv.data.io.raster import write_picture
from medconv.data.loading.samplers import Sampler, balanced
from medconv.data.preprocessing.dataset_cache import cached_fingerprint, fill_store
from medconv.data.preprocessing.preprocess import PreprocessingConfig, framed, preprocess_image
from medconv.features.image_level.csv_table import csv
from medconv.features.image_level.samples import (
    BalancedImageSampler,
    ImageCases,
    ImageDataset,
    samples_per_epoch,
)

LIGHT = {
    "p": {"rotation": 1.0, "noise": 1.0, "additive_brightness": 1.0},
    "spacing_mm": (1.0, 1.0),
    "patch_size": SIZE,
}


def prepare_images(dataset, folder):
    """The store of the dataset, normalised by the dataset, in the size of its first image."""
    measured, _ = cached_fingerprint(dataset, folder, 1)
    dims, names = measured.spatial_dims, ("dataset",) * len(dataset.modalities)
    config = PreprocessingConfig(dims, (1.0,) * dims, names, measured.intensities, frame=measured.shapes[0])
    return config, fill_store(dataset, config, folder, 1)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    dataset = csv(write(root / "data"))
    return dataset, prepare_images(dataset, root / "cache")[1]


def test_image_keeps_its_borders_and_is_normalised_by_the_dataset(tmp_path):
    table = write(tmp_path / "data")
    black = pixels(0)
    black[:3] = 0
    write_picture(tmp_path / "data/0.png", black)
    dataset = csv(table)
    config, store = prepare_images(dataset, tmp_path / "cache")
    images = np.stack([black, *[pixels(i) for i in range(1, COUNT)]]).astype(float)
    assert config.intensities[0]["mean"] == pytest.approx(images.mean(), rel=1e-5)
    expected = (black[::-1, ::-1].T - images.mean()) / images.std()
    entry = store.read("0")
    np.testing.assert_allclose(entry.image[0], expected, atol=1e-4)
    assert entry.image.dtype == np.float32 and entry.label.size == 0
    assert sorted(p.name for p in store.folder.glob("0.*")) == ["0.image.npy", "0.json"]


@pytest.mark.parametrize(("size", "effect"), [((4, 4), "cut"), ((16, 14), "padded"), ((6, 14), "both")])
def test_frame_cuts_and_pads_around_the_centre(size, effect):
    image = np.arange(96, dtype=np.float32).reshape(1, 12, 8) + 1
    out = framed(image, size)
    assert out.shape == (1, *size)
    kept = out[out > 0]
    assert len(kept) == min(12, size[0]) * min(8, size[1])
    x, y = (max(0, n - s) // 2 for n, s in zip((12, 8), size, strict=True))
    assert kept[0] == image[0, x, y], effect


@pytest.mark.parametrize("scaling", [{"resize": (10, 20)}, {"spacing_mm": (8.0, 2.0)}])
def test_pictures_are_scaled_without_aliasing(scaling):
    config = replace(PreprocessingConfig(2, (1.0, 1.0), ("none",), ({},), frame=(10, 20)), **scaling)
    ramp = np.linspace(0, 1, 80)[None, :, None, None] * np.ones((1, 80, 40, 1))
    out, _ = preprocess_image(ramp.astype(np.float32), Grid.of((80, 40, 1), np.eye(4)), config)
    assert out.shape == (1, 10, 20)
    np.testing.assert_allclose(
        out[0, 1:-1, 10], np.linspace(0, 1, 80).reshape(10, 8).mean(1)[1:-1], atol=0.02
    )
    stripes = np.tile([0.0, 1.0, 1.0], 40)[:80][None, :, None, None] * np.ones((1, 80, 40, 1))
    out, _ = preprocess_image(stripes.astype(np.float32), Grid.of((80, 40, 1), np.eye(4)), config)
    assert np.abs(out[0, 1:-1] - 2 / 3).max() < 0.06


def test_volume_is_resampled_then_cut_or_padded(tmp_path):
    save_volume(tmp_path / "v.nii.gz", image_array(0), np.diag([2.0, 1.5, 2.0, 1.0]))  # 12 x 14 x 10 voxels
    dataset = Dataset(
        "v",
        (Case("v", (tmp_path / "v.nii.gz",), values=(0.0,)),),
        ("a", "b"),
        ("MRI",),
        targets=csv(write(tmp_path / "d")).targets,
    )
    config = PreprocessingConfig(3, (1.0, 1.5, 2.0), ("zscore",), ({},), frame=(20, 20, 8))
    image = fill_store(dataset, config, tmp_path / "cache", 1).read("v").image
    assert image.shape == (1, 20, 20, 8)
    assert (image[0, :, :3] == 0).all() and (image[0, :, 3:17] != 0).any(0).all()


def test_only_changed_images_are_prepared_again(tmp_path, caplog):
    table = write(tmp_path / "data")
    dataset = csv(table)
    config, store = prepare_images(dataset, tmp_path / "cache")
    with caplog.at_level(logging.INFO):
        fill_store(dataset, config, tmp_path / "cache", 1)
        assert "preparing" not in caplog.text
        table.write_text(table.read_text().replace("0.png,b", "0.png,a").replace("5.png,b", "5.png,c"))
        relabelled = csv(table)
        assert relabelled.cases[0].values == (0.0,)
        assert fill_store(relabelled, config, tmp_path / "cache", 1).folder == store.folder
        assert "preparing" not in caplog.text  # the images are the same
        path = store.folder / "3.image.npy"
        stat = path.stat()
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        # as a small file that was not flushed before a power cut
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        fill_store(relabelled, config, tmp_path / "cache", 1)
    assert "preparing 1 of 10 cases" in caplog.text


def in_turn(store, cases, seed, **settings):
    return ImageDataset(store, cases, Sampler(training_cases(cases, seed=seed)), **settings)


def test_sample_depends_on_seed_and_number_alone(prepared):
    dataset, store = prepared
    cases = list(dataset.cases)
    one, other = in_turn(store, cases, 3), in_turn(store, cases, 3)
    numbers = [7, 0, 25, 13]
    reversed_order = {n: other[n] for n in reversed(numbers)}
    for n in numbers:
        torch.testing.assert_close(one[n]["image"], reversed_order[n]["image"])
        place = one.case_index(n)
        assert one[n]["label"].tolist() == list(cases[place].values) and one[n]["sample"] == n
        torch.testing.assert_close(
            one[n]["image"], torch.from_numpy(np.array(store.read(cases[place].id).image))
        )
    assert Counter(one.case_index(n) for n in range(3 * COUNT)) == dict.fromkeys(range(COUNT), 3)
    assert [one.case_index(n) for n in range(COUNT)] != [one.case_index(n) for n in range(COUNT, 2 * COUNT)]
    assert [in_turn(store, cases, 4).case_index(n) for n in range(COUNT)] != [
        one.case_index(n) for n in range(COUNT)
    ]
    assert one.describe(7) == (cases[one.case_index(7)].id, "training sample 7")


def test_transforms_do_not_change_the_images_in_memory(prepared):
    dataset, store = prepared

    def brighten(sample):
        sample["image"] += 10
        return sample

    own = pytest.importorskip("medconv.features.sample_transforms.transforms")
    transforms = own.SampleTransforms([brighten], seed=0, spacing_mm=(1, 1), patch_size=SIZE)
    plain = in_turn(store, dataset.cases, 3)
    images = in_turn(store, dataset.cases, 3, transform=transforms)
    for n in (0, 1, 0):
        assert torch.equal(images[n]["image"], plain[n]["image"] + 10)
        assert torch.equal(images[n]["label"], plain[n]["label"]) and images[n]["sample"] == n


def test_balanced_sampling_draws_each_class_equally_often(prepared):
    dataset, store = prepared
    groups = [[1, 2, 3, 4, 6, 7, 8, 9], [0, 5], []]
    sampler = balanced(training_cases(dataset.cases, class_indices=groups), foreground_share=0.3)
    samples = ImageDataset(store, list(dataset.cases), sampler)
    drawn = Counter(samples.case_index(n) for n in range(160))
    assert drawn == dict.fromkeys(groups[0], 10) | dict.fromkeys(groups[1], 40)
    classes = [samples.case_index(n) in groups[1] for n in range(160)]
    assert all(classes[n] != classes[n + 1] for n in range(0, 160, 2))
    again = balanced(training_cases(dataset.cases, class_indices=groups), foreground_share=0.3)
    other = ImageDataset(store, list(dataset.cases), again)
    assert [other.case_index(n) for n in (99, 3, 50)] == [samples.case_index(n) for n in (99, 3, 50)]


def test_memory_and_files_give_the_same_images(prepared, monkeypatch):
    dataset, store = prepared
    in_memory = ImageCases(store, dataset.cases)
    monkeypatch.setattr("medconv.features.image_level.samples._IN_MEMORY", 0)
    on_disk = ImageCases(store, dataset.cases)
    assert in_memory.images is not None and on_disk.images is None
    for i in range(COUNT):
        torch.testing.assert_close(in_memory[i]["image"], on_disk[i]["image"])
        assert in_memory[i]["label"].tolist() == on_disk[i]["label"].tolist()
        assert in_memory[i]["case"] == on_disk[i]["case"]
    assert in_memory[3]["case"] == "3" and in_memory[3]["image"].shape == (1, *SIZE)


def module(prepared, **changes):
    dataset, store = prepared
    settings = {"batch_size": 4, "samples_per_epoch": 8, "num_workers": 0}
    return data_module(
        store, dataset.cases[:7], dataset.cases[7:], SIZE, Augment(0, **LIGHT), **(settings | changes)
    )


def test_batches_have_images_values_and_cases(prepared):
    data = module(prepared)
    first, second = list(data.train_dataloader())
    assert first["image"].shape == (4, 1, *SIZE) and first["image"].dtype == torch.float32
    assert first["label"].shape == (4, 1) and first["label"].dtype == torch.float32
    assert first["sample"].tolist() == [0, 1, 2, 3] and second["sample"].tolist() == [4, 5, 6, 7]
    (batch,) = list(data.val_dataloader())
    assert batch["image"].shape == (3, 1, *SIZE)
    assert batch["label"].tolist() == [[0], [0], [0]] and batch["case"] == ["7", "8", "9"]
    from_workers = list(module(prepared, num_workers=2).train_dataloader())
    for key in ("image", "label", "sample"):
        torch.testing.assert_close(from_workers[1][key], second[key])


def test_each_rank_validates_its_own_cases(prepared):
    cases = []
    for rank in range(2):
        data = module(prepared)
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        data.trainer = SimpleNamespace(strategy=strategy, global_rank=rank, world_size=2, num_devices=2)
        cases.append([case for batch in data.val_dataloader() for case in batch["case"]])
    assert cases == [["7", "9"], ["8"]]


def test_augmentation_keeps_values_and_does_not_depend_on_the_batch():
    augment = Augment(1, **LIGHT)
    image, label = torch.randn(5, 2, *SIZE), torch.rand(5, 3)
    augmented = augment({"image": image, "label": label, "sample": torch.arange(5)})
    assert augmented["label"] is label and augmented["image"].shape == image.shape
    assert not torch.allclose(augmented["image"], image)
    for i in range(5):
        alone = augment({"image": image[i : i + 1], "label": label[i : i + 1], "sample": torch.tensor([i])})
        torch.testing.assert_close(alone["image"][0], augmented["image"][i])
    maps = torch.zeros(5, 1, *SIZE)
    torch.testing.assert_close(
        augment({"image": image, "label": maps, "sample": torch.arange(5)})["image"],
        augmented["image"],
        atol=1e-4,
        rtol=1e-4,
    )


def test_fingerprint_leaves_out_the_test_split(tmp_path):
    """Intensities are computed again if the table moves a case to another split."""
    lines = write(tmp_path).read_text().splitlines()
    write_picture(tmp_path / "9.png", np.full((SIZE[1], SIZE[0]), 255, np.uint8))

    def mean(last_split):
        splits = ["split", *["train"] * 8, "val", last_split]
        (tmp_path / "splits.csv").write_text("\n".join(map(",".join, zip(lines, splits, strict=True))))
        dataset = csv(tmp_path / "splits.csv", label_columns="label")
        return cached_fingerprint(dataset, tmp_path / "home", 1)[0].intensities[0]["mean"]

    assert mean("test") < mean("train") - 5
    assert mean("test") == pytest.approx(np.mean([pixels(i) for i in range(9)]), abs=1e-3)


def test_loader_without_validation_cases_is_empty(prepared):
    """As with `data.fold=all`."""
    data = module(prepared)
    data.split = data.split._replace(val=[])
    assert list(data.val_dataloader()) == []


@pytest.mark.parametrize(("cases", "samples"), [(160, 1000), (300, 1500), (10**6, 5000)])
def test_an_epoch_shows_each_image_five_times_within_limits(cases, samples):
    assert samples_per_epoch(cases) == samples


IDS = ("a", "b", "c", "d")


def test_image_level_classes_take_turns_and_so_do_their_cases():
    indices = [[0, 1, 2], [], [3]]
    sampler = BalancedImageSampler(training_cases(cases_of(IDS), class_indices=indices))
    drawn = [sampler.case_index(n) for n in range(60)]
    assert Counter(drawn) == {0: 10, 1: 10, 2: 10, 3: 30}
    assert all((drawn[n] == 3) != (drawn[n + 1] == 3) for n in range(0, 60, 2))
    of_first = [case_index for case_index in drawn if case_index != 3]
    assert all(sorted(of_first[n : n + 3]) == [0, 1, 2] for n in range(0, 30, 3))
    backwards = BalancedImageSampler(training_cases(cases_of(IDS), class_indices=indices))
    assert [backwards.case_index(n) for n in reversed(range(60))][::-1] == drawn


def test_weights_count_within_an_image_level_class():
    cases = training_cases(cases_of(IDS, [1, 3, 1, 1]), class_indices=[[0, 1], [2, 3]])
    sampler = BalancedImageSampler(cases)
    drawn = Counter(sampler.case_index(n) for n in range(400))
    assert drawn[0] == pytest.approx(50, abs=15) and drawn[1] == pytest.approx(150, abs=15)
    assert drawn[2] == drawn[3] == 100


def test_one_image_level_class_is_drawn_alone():
    sampler = BalancedImageSampler(training_cases(cases_of(IDS), class_indices=[[], [1, 2]]))
    assert Counter(sampler.case_index(n) for n in range(20)) == {1: 10, 2: 10}
