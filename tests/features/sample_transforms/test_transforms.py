"""medconv/features/sample_transforms/transforms.py: samples depend on seed and number alone; clear errors."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from torch import Tensor

from medconv.features.sample_transforms.transforms import SampleTransforms

SHAPES = {2: (12, 10), 3: (12, 10, 8)}
SPACING_MM = {2: (1.0, 2.0), 3: (1.0, 2.0, 3.0)}
BOTH = ["image", "label"]
Sample = dict[str, Any]


def make(*transforms, axes=3, seed=0, **changes):
    settings = {"seed": seed, "spacing_mm": SPACING_MM[axes], "patch_size": SHAPES[axes], **changes}
    return SampleTransforms(list(transforms), **settings)


def sample_of(number, axes=3, channels=2):
    rng = np.random.default_rng(number % 2)
    label = torch.from_numpy(rng.integers(0, 3, (1, *SHAPES[axes])).astype(np.uint8))
    image = torch.from_numpy(rng.normal(size=(channels, *SHAPES[axes])).astype(np.float32))
    return {"image": image, "label": label, "sample": number}


def monai_transforms():
    """Random transforms at several depths."""
    affine = mt.RandAffined(
        BOTH, prob=0.8, rotate_range=[0.5] * 3, scale_range=[0.2] * 3, mode=["bilinear", "nearest"]
    )
    noise = mt.OneOf([mt.RandGaussianNoised("image", prob=1), mt.RandScaleIntensityd("image", 0.5, prob=1)])
    return [affine, mt.Compose([mt.RandFlipd(BOTH, prob=0.5, spatial_axis=0), noise])]


def torchio_transforms():
    tio = pytest.importorskip("torchio", reason="pip install torchio")
    moves = [tio.RandomAffine(degrees=20), tio.RandomFlip(0)]
    return [tio.Compose([*moves, tio.RandomNoise(std=(0.1, 0.2))]), tio.RandomGamma()]


class Unseeded:
    """Adds a number of a generator that MONAI's `set_random_state` does not reach."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __call__(self, sample: Sample) -> Sample:
        return {**sample, "image": sample["image"] + self.draw()}


def hidden():
    """A transform that a function holds."""
    transform = mt.RandScaleIntensity(0.5, prob=1)
    return lambda: transform(torch.ones(1))


FAMILIES = {
    "monai": monai_transforms,
    "torchio": torchio_transforms,
    "both": lambda: [*monai_transforms(), *torchio_transforms()],
    "torch's generator": lambda: [Unseeded(lambda: torch.rand(1))],
    "numpy's generator": lambda: [Unseeded(np.random.rand)],
    "Python's generator": lambda: [Unseeded(random.random)],
    "a hidden transform": lambda: [Unseeded(hidden())],
}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_alone_equals_the_sample_in_any_sequence(family, axes):
    one = make(*FAMILIES[family](), axes=axes)
    in_order = [one(sample_of(n, axes)) for n in range(6)]
    for n in (4, 1, 4):
        assert_same(make(*FAMILIES[family](), axes=axes)(sample_of(n, axes)), in_order[n])
        assert_same(one(sample_of(n, axes)), in_order[n])
    images = [sample["image"] for sample in in_order]
    assert not any(torch.equal(images[n], images[n + 2]) for n in range(4))  # of the same input
    other = make(*FAMILIES[family](), axes=axes, seed=1)(sample_of(0, axes))
    assert not torch.equal(other["image"], images[0])


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("family", ["monai", "torchio"])
def test_results_are_plain_tensors_of_the_types_from_before(family, axes):
    for n in range(4):
        before = sample_of(n, axes)
        image, label = before["image"].clone(), before["label"].clone()
        after = make(*FAMILIES[family](), axes=axes)(before)
        assert torch.equal(before["image"], image) and torch.equal(before["label"], label)
        assert set(after) == {"image", "label", "sample"} and after["sample"] == n
        for key in BOTH:
            assert type(after[key]) is Tensor and after[key].is_contiguous()
            assert after[key].dtype == before[key].dtype and after[key].shape == before[key].shape
        assert set(after["label"].unique().tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("family", ["monai", "torchio"])
def test_image_and_label_move_together(family):
    flip = mt.RandFlipd(BOTH, prob=0.5, spatial_axis=1)
    if family == "torchio":
        flip = pytest.importorskip("torchio", reason="pip install torchio").RandomFlip(1)
    transforms, mirrored = make(flip), []
    for n in range(12):
        sample = sample_of(n)
        sample["image"] = sample["label"].float()
        after = transforms(sample)
        assert torch.equal(after["image"], after["label"].float())
        mirrored.append(torch.equal(after["image"], sample["image"].flip(2)))
    assert 2 < sum(mirrored) < 10


def test_torchio_gets_the_spacing_and_knows_the_label_map():
    tio = pytest.importorskip("torchio", reason="pip install torchio")
    seen = []

    class Look(tio.Transform):
        def apply_transform(self, subject: Any) -> Any:
            seen.append({key: (type(image).__name__, image.spacing) for key, image in subject.items()})
            return subject

    make(Look())(sample_of(0))
    make(Look(), axes=2)(sample_of(0, 2))
    make(Look(), axes=2)({**sample_of(0, 2), "label": torch.ones(3)})
    volume, flat = (1.0, 2.0, 3.0), (1.0, 2.0, 1.0)
    assert seen == [
        {"image": ("ScalarImage", volume), "label": ("LabelMap", volume)},
        {"image": ("ScalarImage", flat), "label": ("LabelMap", flat)},
        {"image": ("ScalarImage", flat)},
    ]


def test_image_level_labels_are_not_given_to_the_transforms():
    seen = []
    transforms = make(lambda sample: seen.append(list(sample)) or {"image": sample["image"] + 1})
    before = {**sample_of(3), "label": torch.tensor([1.0, 0.5])}
    after = transforms(before)
    assert seen == [["image"]] and torch.equal(after["image"], before["image"] + 1)
    assert torch.equal(after["label"], before["label"])


def test_random_numbers_outside_go_on_as_if_nothing_was_drawn():
    def draws():
        return [torch.rand(1).item(), np.random.rand(), random.random(), mt.Randomizable.R.rand()]

    def draw():
        return sum(draws())

    def seeded():
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        mt.Randomizable.R.seed(0)

    seeded()
    expected = draws()
    seeded()
    make(Unseeded(draw))(sample_of(0))
    assert draws() == expected
    seeded()
    with pytest.raises(ValueError, match="raised"):
        make(Unseeded(draw), lambda sample: 1 / 0)(sample_of(0))
    assert draws() == expected


def test_threads_do_not_change_a_sample():
    """The main process has several, a worker one; sums of many numbers differ in their last bit."""
    image = torch.randn(8, 48, 48, 48, generator=torch.Generator().manual_seed(0))
    sample = {"image": image, "label": torch.zeros(1), "sample": 0}

    def centred(sample):
        return {"image": torch.stack([channel - channel.mean() for channel in sample["image"]])}

    images, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            images.append(make(centred, patch_size=(48, 48, 48))(sample)["image"])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(images[0], images[1]) and torch.equal(images[0], images[2])


class Unreadable(mt.Transform):
    def __call__(self, sample: Sample) -> Sample:
        raise OSError("no\n  file")


ERRORS = {
    "shape of the image": (
        mt.RandSpatialCropd(BOTH, roi_size=[4, 4, 4], random_size=False),
        r"augmentation: the transforms return image of shape \(2, 4, 4, 4\), expected \(2, 12, 10, 8\): channels, then "
        r"the patch size",
    ),
    "shape of the label": (
        mt.AsDiscreted("label", to_onehot=3),
        r"augmentation: the transforms return label of shape \(3, 12, 10, 8\), expected \(1, 12, 10, 8\)",
    ),
    "no tensor": (lambda sample: {**sample, "image": "a.nii.gz"}, r"return image of shape \(\), expected"),
    "a missing key": (
        mt.SelectItemsd("image"),
        r"augmentation: SelectItemsd must return a dictionary with image, label, got \['image'\]",
    ),
    "many samples": (
        mt.RandCropByPosNegLabeld(BOTH, "label", [4, 4, 4], num_samples=2),
        r"augmentation: RandCropByPosNegLabeld must return a dictionary with image, label, got list",
    ),
    "an error": (Unreadable(), r"augmentation: Unreadable raised OSError: no file"),
    "an error in a Compose": (
        mt.Compose([mt.RandFlipd("imgae", prob=1)]),
        r"augmentation: Compose raised RuntimeError: applying transform <monai\S+RandFlipd object at \w+>, from KeyError: .*imgae",
    ),
    "linear interpolation of labels": (
        mt.RandAffined(BOTH, prob=1, rotate_range=[0.5] * 3),
        r"augmentation: the transforms return label value [\d.]+, expected whole numbers up to 255; move labels by mode "
        "`nearest`",
    ),
    "labels below 0": (
        lambda sample: {**sample, "label": sample["label"].float() - 1},
        r"return label value -1, expected whole numbers up to 255",
    ),
}


@pytest.mark.parametrize("fault", ERRORS)
def test_errors_name_the_transform_and_what_it_returned(fault):
    transform, message = ERRORS[fault]
    with pytest.raises(ValueError, match=message):
        make(transform)(sample_of(0))


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (mt.RandFlipd("image"), r"transforms must be a list of transforms, .*got <monai"),
        ([{"keys": ["image"]}], r"each with its _target_, got \[\{'keys': \['image'\]\}\]"),
    ],
)
def test_transforms_are_a_list_of_functions(transforms, message):
    with pytest.raises(ValueError, match=message):
        SampleTransforms(transforms, seed=0, spacing_mm=(1, 1), patch_size=(4, 4))


def test_mirrored_axes_are_axes_of_the_image():
    assert make(mirror_axes="all").mirror_axes == (0, 1, 2)
    with pytest.raises(ValueError, match=r"mirror_axes must be .*got \[3\]"):
        make(mirror_axes=[3])


@pytest.mark.parametrize(("axis", "warns"), [(0, True), (None, False)])
def test_pairs_of_left_and_right_labels_give_a_warning(caplog, axis, warns):
    with caplog.at_level(logging.WARNING):
        make(flip_label_pairs=[(1, 2)], left_right_axis=axis)
    assert ("flip_label_pairs swaps no labels in these transforms" in caplog.text) == warns


def test_probabilities_as_labels_may_be_interpolated():
    sample = sample_of(0)
    sample["label"] = torch.rand(2, *SHAPES[3]).half()
    moved = make(mt.RandAffined(BOTH, prob=1, rotate_range=[0.5] * 3))(sample)
    assert moved["label"].dtype == torch.float16 and not torch.equal(moved["label"], sample["label"])


def test_metadata_of_monai_stays_inside():
    seen = []
    transforms = make(
        mt.RandFlipd("image", prob=1), lambda sample: seen.append(type(sample["image"])) or sample
    )
    assert type(transforms(sample_of(0))["image"]) is Tensor and seen == [MetaTensor]
