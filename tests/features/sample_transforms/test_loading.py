"""Samples transformed in loader workers: the same in any worker and run, and errors that name the case."""

from importlib.util import find_spec

import monai.transforms as mt
import pytest
import torch
from helpers.loading import data_module
from helpers.volumes import preprocessing_config, tiny

from medconv.data.case import Dataset
from medconv.data.preprocessing.dataset_cache import fill_store
from medconv.data.preprocessing.store import Store
from medconv.features.sample_transforms.transforms import SampleTransforms

PATCH = (6, 5, 4)
PreparedData = tuple[Dataset, Store]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loading")
    dataset = tiny(folder / "data", 4)
    return dataset, fill_store(dataset, preprocessing_config(), folder / "cache", 1)


def module(prepared, augment, num_workers=0, samples=6):
    dataset, store = prepared
    train, val = dataset.cases[:3], dataset.cases[3:]
    settings = {"batch_size": 2, "samples_per_epoch": samples, "num_workers": num_workers}
    return data_module(store, train, val, PATCH, augment, **settings)


def sample_transforms(*transforms):
    return SampleTransforms(transforms, seed=0, spacing_mm=(1, 1.5, 2), patch_size=PATCH)


def monai_transforms():
    keys = ["image", "label"]
    move = mt.RandAffined(keys, prob=0.8, rotate_range=[0.5] * 3, mode=["bilinear", "nearest"])
    return [move, mt.OneOf([mt.RandGaussianNoised("image", prob=1), mt.RandFlipd(keys, prob=0.5)])]


def torchio_transforms():
    import torchio

    return [torchio.RandomAffine(), torchio.RandomNoise(std=(0.1, 0.2))]


@pytest.mark.parametrize(
    "family",
    [
        monai_transforms,
        pytest.param(
            torchio_transforms,
            marks=pytest.mark.skipif(find_spec("torchio") is None, reason="pip install torchio"),
        ),
    ],
)
def test_workers_and_restarts_do_not_change_transformed_samples(prepared, family):
    """Every run has transforms of its own, as a resumed one has."""

    def batches(workers, begin=0):
        data = module(prepared, sample_transforms(*family()), workers, 12)
        loader = data.train_dataloader()
        loader.sampler.first_batch = begin
        return list(loader)

    expected = batches(0)
    assert len(expected) == 6
    plain = list(module(prepared, lambda batch: batch, samples=12).train_dataloader())
    assert not any(torch.equal(a["image"], b["image"]) for a, b in zip(expected, plain, strict=True))
    for found, same in ((batches(1), expected), (batches(2), expected), (batches(2, begin=3), expected[3:])):
        assert len(found) == len(same)
        for one, other in zip(found, same, strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_transform_names_sample_case_and_transform(prepared, workers):
    flip = mt.RandFlipd(["image", "mask"], prob=1)
    loader = module(prepared, sample_transforms(flip), workers).train_dataloader()
    with pytest.raises(
        ValueError,
        match=r"case case_\d \(training sample [0-3]\): augmentation: RandFlipd raised KeyError: .*mask",
    ):
        list(loader)
    if workers:
        loader._iterator._shutdown_workers()
