"""Image-level losses against torch's, which of them fit which target type, and mixup."""

import numpy as np
import pytest
import torch
from monai.losses import DiceCELoss, DiceFocalLoss, TverskyLoss
from torch import nn
from torch.nn import functional as F

from medconv.features.image_level.losses import CrossEntropy, RegressionLoss
from medconv.features.image_level.mixup import Mixup
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.multilabel import MultilabelTargets
from medconv.features.image_level.regression import RegressionTargets
from medconv.training.losses.fit import FittedLoss
from medconv.training.losses.segmentation import DiceCrossEntropy

CLASSES = MulticlassTargets(("a", "b", "c"))
FINDINGS = MultilabelTargets(("left", "right"))
MEANS, STDS = (60.0, 1000.0), (10.0, 200.0)
NUMBERS = RegressionTargets(("age", "volume"), MEANS, STDS)


def test_cross_entropy_of_classes_equals_torchs():
    torch.manual_seed(0)
    logits, label = torch.randn(50, 3), torch.randint(3, (50, 1)).float()
    loss = FittedLoss(CrossEntropy(label_smoothing=0.1), CLASSES, 2)
    expected = F.cross_entropy(logits, label[:, 0].long(), label_smoothing=0.1)
    torch.testing.assert_close(loss(logits, loss.targets.encode(label)), expected)


def test_class_weights_multiply_the_losses_of_samples():
    logits, label = torch.randn(6, 3), torch.tensor([0, 0, 0, 1, 1, 2.0])[:, None]
    loss = FittedLoss(CrossEntropy(class_weights="balanced", class_counts=[3, 2, 1]), CLASSES, 2)
    each = F.cross_entropy(logits, label[:, 0].long(), reduction="none")
    expected = sum(float(e) * w for e, w in zip(each, [2 / 3, 2 / 3, 2 / 3, 1, 1, 2], strict=True)) / 6
    assert float(loss(logits, loss.targets.encode(label))) == pytest.approx(expected, rel=1e-5)
    own = FittedLoss(CrossEntropy(class_weights=[2 / 3, 1, 2]), CLASSES, 2)
    torch.testing.assert_close(
        own(logits, own.targets.encode(label)), loss(logits, loss.targets.encode(label))
    )


def test_label_weights_multiply_the_losses_of_positive_samples():
    torch.manual_seed(0)
    logits, label = torch.randn(10, 2), torch.randint(2, (10, 2)).float()
    loss = FittedLoss(CrossEntropy(False, 0.2, "balanced", [10, 80], 100), FINDINGS, 2)
    expected = F.binary_cross_entropy_with_logits(
        logits, 0.8 * label + 0.1, pos_weight=torch.tensor([9.0, 0.25])
    )
    torch.testing.assert_close(loss(logits, loss.targets.encode(label)), expected)


@pytest.mark.parametrize(
    ("penalty", "torchs"), [("mse", nn.MSELoss()), ("l1", nn.L1Loss()), ("huber", nn.HuberLoss(delta=0.7))]
)
def test_regression_errors_are_in_standard_deviations(penalty, torchs):
    torch.manual_seed(0)
    truth, prediction = torch.randn(10, 2), torch.randn(10, 2)
    scale, shift = torch.tensor(STDS), torch.tensor(MEANS)
    loss = FittedLoss(RegressionLoss(penalty, 0.7), NUMBERS, 2)
    value = loss(prediction * scale + shift, loss.targets.encode(truth * scale + shift))
    torch.testing.assert_close(value, torchs(prediction, truth), rtol=1e-4, atol=1e-4)
    same = FittedLoss(torchs, NUMBERS, 2)
    torch.testing.assert_close(
        same(prediction * scale + shift, same.targets.encode(truth * scale + shift)), value
    )


@pytest.mark.parametrize(
    ("loss", "image_targets", "message"),
    [
        (
            CrossEntropy(),
            FINDINGS,
            "CrossEntropy is for multiclass targets, but the data has multilabel targets; use loss=bce",
        ),
        (
            CrossEntropy(exclusive=False),
            CLASSES,
            "is for multilabel targets, but the data has multiclass targets; use loss=cross_entropy",
        ),
        (
            RegressionLoss(),
            CLASSES,
            "RegressionLoss is for regression targets, but the data has multiclass targets; "
            "use loss=cross_entropy",
        ),
        (
            nn.MSELoss(),
            FINDINGS,
            "MSELoss is for regression targets, but the data has multilabel targets; use loss=bce",
        ),
        (CrossEntropy(), NUMBERS, "the data has regression targets; use loss=huber"),
        (DiceCrossEntropy(), CLASSES, "DiceCrossEntropy is for label_map and regions targets"),
        (DiceCrossEntropy(), NUMBERS, "use loss=huber"),
        (DiceFocalLoss(to_onehot_y=True, softmax=True, batch=True), CLASSES, "use loss=cross_entropy"),
        (TverskyLoss(sigmoid=True, batch=True), FINDINGS, "use loss=bce"),
        (DiceCELoss(sigmoid=True, batch=True), FINDINGS, "use loss=bce"),
        (
            CrossEntropy(class_weights=[1, 2]),
            CLASSES,
            r"loss: class_weights must be 3 numbers, one per output, got 2",
        ),
    ],
)
def test_a_loss_that_does_not_fit_is_an_error_of_one_line(loss, image_targets, message):
    with pytest.raises(ValueError, match=message) as caught:
        FittedLoss(loss, image_targets, 2)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("loss")


@pytest.mark.parametrize(
    ("loss", "image_targets"),
    [(nn.CrossEntropyLoss(), CLASSES), (nn.BCEWithLogitsLoss(), FINDINGS), (nn.SmoothL1Loss(), NUMBERS)],
)
def test_torchs_losses_are_accepted(loss, image_targets):
    FittedLoss(loss, image_targets, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_smoothing": 1.0}, "^label_smoothing must be a number from 0 to below 1, got 1.0"),
        (
            {"class_weights": "rare"},
            "^class_weights must be none, balanced, or numbers of 0 or more, got rare",
        ),
        ({"class_weights": [1, -1]}, "numbers of 0 or more"),
        ({"class_weights": "balanced"}, "balanced needs training cases of each class, got None of 0"),
        ({"class_weights": "balanced", "class_counts": [3, 0]}, r"got \[3, 0\] of 3"),
        (
            {"exclusive": False, "class_weights": "balanced", "class_counts": [5, 2], "num_cases": 5},
            "training cases with and without each label",
        ),
    ],
)
def test_invalid_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        CrossEntropy(**settings)
    with pytest.raises(ValueError, match=r"^penalty must be one of mse, l1, huber"):
        RegressionLoss("cubic")
    with pytest.raises(ValueError, match=r"^delta must be a positive number"):
        RegressionLoss(delta=0)


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
