"""medconv/data/loading/patch_dataset.py: samples by number, positions of patches, shares of ranks and epochs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.loading import cases_of, patch_dataset, training_cases
from helpers.volumes import CLASSES, image_array, label_array, preprocessing_config, tiny

from medconv.data.augmentation.augment import centre
from medconv.data.case import Grid
from medconv.data.io.images import read_label
from medconv.data.loading.loader import SampleOrder
from medconv.data.loading.patch_dataset import (
    Annotated,
    CaseDataset,
    ChannelDropout,
    annotated_classes,
    crop,
    without_dropped,
)
from medconv.data.loading.samplers import ForegroundSampler
from medconv.data.preprocessing.dataset_cache import fill_store
from medconv.data.preprocessing.preprocess import CropInfo, Entry
from medconv.data.preprocessing.store import Store
from medconv.targets.regions import RegionTargets

PATCH = (6, 5, 4)
DROPOUT = ChannelDropout(0.4, 3, {"lacks": (1,), "one": (0, 2)}, seed=0)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patches")
    dataset = tiny(folder / "data", 5)
    return dataset, fill_store(dataset, preprocessing_config(), folder / "cache", 1)


def patches(prepared, share=0.5, patch=PATCH, seed=0):
    dataset, store = prepared
    return patch_dataset(store, [case.id for case in dataset.cases], patch, seed, share)


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)


def slow_crop(array, start, size):
    """Voxel by voxel."""
    out = np.zeros((len(array), *size), array.dtype)
    for place in np.ndindex(*size):
        source = tuple(s + p for s, p in zip(start, place, strict=True))
        if all(0 <= i < n for i, n in zip(source, array.shape[1:], strict=True)):
            for channel in range(len(array)):
                out[(channel, *place)] = array[(channel, *source)]
    return out


@pytest.mark.parametrize("axes", [2, 3])
def test_crop_equals_a_loop_over_voxels(axes):
    rng = np.random.default_rng(axes)
    for _ in range(40):
        array = rng.integers(1, 99, (2, *rng.integers(2, 8, axes))).astype(np.int16)
        size = tuple(rng.integers(1, 9, axes))
        start = tuple(int(rng.integers(1 - p, n)) for p, n in zip(size, array.shape[1:], strict=True))
        box = crop(array, start, size)
        assert box.dtype == array.dtype
        np.testing.assert_array_equal(box, slow_crop(array, start, size))


def test_crop_is_a_copy():
    array = np.ones((1, 4, 4), np.float32)
    crop(array, (0, 0), (4, 4))[:] = 5
    assert array.max() == 1


def test_sample_is_a_patch_of_its_case(prepared):
    dataset = patches(prepared)
    for n in range(20):
        sample = dataset[n]
        assert sample["sample"] == n
        assert type(sample["image"]) is type(sample["label"]) is torch.Tensor
        assert sample["image"].shape == sample["label"].shape == (1, *PATCH)
        assert sample["image"].dtype == torch.float32 and sample["label"].dtype == torch.uint8
        image, label = sample["image"].numpy()[0], sample["label"].numpy()[0]
        case = int(dataset.case_of(n)[-1])
        windows = np.lib.stride_tricks.sliding_window_view(image_array(case), PATCH)
        (start,) = np.argwhere((windows == image).all((3, 4, 5)))  # exactly one place
        np.testing.assert_array_equal(label, crop(label_array(case)[None], start, PATCH)[0])


def test_sample_depends_on_seed_and_number_alone(prepared):
    one, other = patches(prepared), patches(prepared)
    forwards = [one[n] for n in range(12)]
    backwards = [other[n] for n in reversed(range(12))][::-1]
    assert all(same(a, b) for a, b in zip(forwards, backwards, strict=True))
    different = patches(prepared, seed=1)
    assert sum(same(a, different[n]) for n, a in enumerate(forwards)) < 6
    # one case, so only its places differ
    first, second = (patch_dataset(prepared[1], ["case_0"], PATCH, seed) for seed in (0, 1))
    assert sum(same(first[n], second[n]) for n in range(12)) < 6
    assert not all(same({**forwards[0], "sample": 0}, {**a, "sample": 0}) for a in forwards)


def synthetic(store, label, tmp_path):
    """One case whose image is its label, written to the store directly."""
    case = tiny(tmp_path / "source", 1).cases[0]
    rows = [
        np.column_stack([np.full(np.count_nonzero(label == v), v), np.argwhere(label == v)]) for v in (1, 2)
    ]
    foreground = np.concatenate(rows).astype(np.int32)
    crop_info = CropInfo(Grid.of(label.shape, np.eye(4)), label.shape, tuple((0, n) for n in label.shape))
    store.write(case, Entry(label[None].astype(np.float32), label, foreground, crop_info))
    return patch_dataset(store, [case.id], (4,) * label.ndim, foreground_share=1.0)


def test_oversampling_is_the_share_of_centred_patches(tmp_path):
    label = np.zeros((40, 40), np.uint8)
    label[20, 20] = 1
    dataset = synthetic(Store(tmp_path / "store"), label, tmp_path)
    dataset.sampler.foreground_share = 0.25
    with_foreground = sum(bool(dataset[n]["label"].any()) for n in range(400))
    by_chance = 16 / 37**2
    assert 0.25 + by_chance == pytest.approx(with_foreground / 400, abs=0.08)
    dataset.sampler.foreground_share = 1.0
    assert [dataset[n]["label"][0, 2, 2].item() for n in range(5)] == [1] * 5  # centred: patch 4, voxel 2


def test_small_images_are_padded_on_both_sides(prepared):
    """(12, 14, 10) into (16, 14, 13): two voxels on each side of the first axis, two and one of the last."""
    dataset = patches(prepared, share=1.0, patch=(16, 14, 13))
    for n in range(5):
        sample, case = dataset[n], int(dataset.case_of(n)[-1])
        np.testing.assert_array_equal(sample["image"][0, 2:14, :, 2:12], image_array(case))
        np.testing.assert_array_equal(sample["label"][0, 2:14, :, 2:12], label_array(case))
        assert sample["image"].count_nonzero() == 12 * 14 * 10
        assert sample["label"].count_nonzero() == np.count_nonzero(label_array(case))


def test_epoch_may_start_at_any_batch():
    """This applies once: the next epoch is complete again."""
    order = SampleOrder(6, 2)
    order.set_epoch(3)
    order.first_batch = 2
    assert list(order) == [22, 23]
    assert list(order) == [18, 19, 20, 21, 22, 23]
    order.first_batch = 3
    assert list(order) == []


@pytest.mark.parametrize(
    ("batch_size", "world_size", "per_epoch"), [(1, 1, 7), (2, 2, 8), (3, 2, 20), (4, 3, 1)]
)
def test_ranks_share_each_global_batch(batch_size, world_size, per_epoch):
    ranks = [SampleOrder(per_epoch, batch_size, rank, world_size) for rank in range(world_size)]
    step = batch_size * world_size
    samples = -(-per_epoch // step) * step  # of complete global batches
    assert all(len(order) * world_size == samples for order in ranks)
    for epoch in range(3):
        for order in ranks:
            order.set_epoch(epoch)
        numbers = np.array([list(order) for order in ranks]).reshape(world_size, -1, batch_size)
        for batch in range(numbers.shape[1]):
            first = epoch * samples + batch * step
            assert numbers[:, batch].ravel().tolist() == list(range(first, first + step))


def test_validation_items_are_whole_cases(prepared):
    dataset, store = prepared
    cases = CaseDataset(store, dataset.cases)
    assert len(cases) == 5
    for i, case in enumerate(dataset.cases):
        item = cases[i]
        assert item["case"] == case.id and case.label is not None
        assert item["image"].shape == item["label"].shape == (1, 1, 12, 14, 10)
        np.testing.assert_array_equal(item["image"][0, 0], image_array(i))
        np.testing.assert_array_equal(item["label"][0, 0], label_array(i))
        np.testing.assert_array_equal(item["reference"], read_label(case.label)[0])
    assert set(np.unique(item["label"])) <= set(range(len(CLASSES)))


def test_validation_reference_is_native(tmp_path):
    """The image has the prepared spacing, the reference its own."""
    dataset = tiny(tmp_path / "data", 1, affine=np.diag([-1, 1.5, 2, 1]))
    store = fill_store(dataset, preprocessing_config((2, 1.5, 2)), tmp_path / "cache", 1)
    item = CaseDataset(store, dataset.cases)[0]
    assert item["image"].shape == (1, 1, 6, 14, 10)
    np.testing.assert_array_equal(item["reference"], label_array(0))


def test_read_size_keeps_the_centre(prepared):
    """Larger or smaller than the patch, as augmentation needs it; 0 outside of the image."""
    dataset, store = prepared
    ids = [case.id for case in dataset.cases]
    sizes = [(6, 5, 4), (10, 9, 8), (4, 3, 4), (30, 31, 20)]
    plain = patch_dataset(store, ids, (6, 5, 4))
    sized = patch_dataset(store, ids, (6, 5, 4), read_size=lambda n: sizes[n % 4])
    for number in range(16):
        size = sizes[number % 4]
        overlap = [min(p, s) for p, s in zip((6, 5, 4), size, strict=True)]
        for key in ("image", "label"):
            patch, box = plain[number][key], sized[number][key]
            assert box.shape[1:] == size
            assert torch.equal(centre(patch, overlap), centre(box, overlap))
    largest = sized[3]["image"]
    assert (largest == 0).any() and largest.max() > 5


def annotating(label_values):
    (case,) = cases_of(["case_0"])
    return ForegroundSampler(training_cases([replace(case, annotated=label_values)], (4, 4)), 1.0)


def test_a_case_that_lacks_labels_is_centred_on_annotated_classes_alone(tmp_path):
    label = np.zeros((20, 20), np.uint8)
    label[2, 2], label[17, 17] = 1, 2
    dataset = synthetic(Store(tmp_path / "store"), label, tmp_path)
    assert {int(dataset[n]["label"].max()) for n in range(20)} == {1, 2} and "annotated" not in dataset[0]
    dataset.annotated = {"case_0": Annotated((2,), (True, False, True))}
    dataset.sampler = annotating((2,))
    samples = [dataset[n] for n in range(20)]
    assert {int(sample["label"].max()) for sample in samples} == {2}
    assert samples[0]["annotated"].tolist() == [True, False, True]
    dataset.annotated = {"case_0": Annotated((3,), (True, False, False))}
    dataset.sampler = annotating((3,))
    assert any(int(dataset[n]["label"].max()) == 0 for n in range(20))  # nothing to be centred on


def test_outputs_follow_from_annotated_label_values(tmp_path):
    first, second, _ = tiny(tmp_path).cases
    dataset, train = tiny(tmp_path / "again"), [first, replace(second, annotated=(2,))]
    annotated = annotated_classes(train, dataset.targets, dataset.class_names)
    assert annotated == {"case_0": ((1, 2), (True, True, True)), "case_1": ((2,), (True, False, True))}
    regions = RegionTargets(("whole", "core"), ((1, 2), (2,)), None, (1, 2))
    annotated = annotated_classes(train, regions, dataset.class_names)
    assert annotated["case_1"].outputs == (False, True)


def test_channels_are_dropped_with_the_probability_and_one_is_kept():
    kept = torch.stack([DROPOUT.kept("whole", sample) for sample in range(2000)])
    assert kept.any(1).all()
    # all three are dropped in 0.4^3 of the samples, and then one of them is kept after all
    torch.testing.assert_close(kept.float().mean(0), torch.full((3,), 0.6 + 0.4**3 / 3), atol=0.03, rtol=0)
    assert torch.equal(kept[7], DROPOUT.kept("whole", 7))


def test_what_the_case_lacks_is_never_kept():
    kept = torch.stack([DROPOUT.kept("lacks", sample) for sample in range(200)])
    assert not kept[:, 1].any() and kept.any(1).all() and not kept[:, 0].all()
    assert all(DROPOUT.kept("one", sample).tolist() == [False, True, False] for sample in range(20))


def test_dropped_channels_are_exactly_0():
    image = torch.randn(2, 3, 4, 5)
    image[0, 1] = torch.nan
    kept = torch.tensor([[True, False, True], [False, True, True]])
    dropped = without_dropped({"image": image, "kept": kept, "sample": 1})["image"]
    assert not dropped[~kept].any()
    assert torch.equal(dropped[kept], image[kept])
