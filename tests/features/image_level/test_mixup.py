"""medconv/features/image_level/mixup.py: shares and partners follow from the seed; images and targets are mixed alike."""

import numpy as np
import pytest
import torch

from medconv.features.image_level.mixup import Mixup


def batch_of(numbers):
    images = torch.stack([torch.full((1, 4, 4), float(n)) for n in numbers])
    return images, torch.tensor([[float(n), 1.0] for n in numbers])


def test_mixup_is_a_function_of_seed_and_sample_numbers():
    numbers, order = [7, 3, 12, 100, 5], [2, 0, 4, 1, 3]
    image, target = Mixup(0.4, 1)(*batch_of(numbers), numbers)
    reordered = [numbers[i] for i in order]
    image2, target2 = Mixup(0.4, 1)(*batch_of(reordered), reordered)
    torch.testing.assert_close(image2, image[order])
    torch.testing.assert_close(target2, target[order])
    other, _ = Mixup(0.4, 2)(*batch_of(numbers), numbers)
    assert not torch.allclose(other, image)


def test_mixup_mixes_image_and_target_alike():
    numbers = list(range(40, 72))
    image, target = batch_of(numbers)
    mixed, mixed_target = Mixup(1.0, 0)(image, target, numbers)
    torch.testing.assert_close(mixed.mean((1, 2, 3)), mixed_target[:, 0])
    torch.testing.assert_close(mixed_target[:, 1], torch.ones(32))
    shares, partners = Mixup(1.0, 0).draw(numbers)
    assert sorted(partners) == list(range(32)) and not (partners == np.arange(32)).any()
    expected = [s * n + (1 - s) * numbers[p] for s, n, p in zip(shares, numbers, partners, strict=True)]
    np.testing.assert_allclose(mixed_target[:, 0], expected, rtol=1e-5)
    assert 0.35 < shares.mean() < 0.65 and shares.min() < 0.2 and shares.max() > 0.8


def test_alpha_0_changes_nothing_and_an_invalid_one_is_an_error():
    image, target = batch_of([1, 2])
    assert Mixup(0, 0)(image, target, [1, 2]) == (image, target)
    for alpha in (-1, float("nan"), "0.2", True):
        with pytest.raises(ValueError, match=r"^alpha must be a number of 0 or more"):
            Mixup(alpha, 0)
