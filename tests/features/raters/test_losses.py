"""medconv/features/raters/losses.py: against a loop over voxels, against Dice of hard labels, and its optimum."""

import pytest
import torch
from torch.nn import functional as F

from medconv.features.raters.losses import SoftDiceCrossEntropy
from medconv.features.raters.targets import SoftTargets
from medconv.targets.label_map import LabelMapTargets
from medconv.training.losses.fit import FittedLoss
from medconv.training.losses.segmentation import DiceCrossEntropy

NAMES = ["background", "a", "b"]
TARGETS = SoftTargets.of_classes(NAMES)


def example(shape=(2, 3, 4, 5)):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(shape, generator=generator)
    return logits, torch.randn(shape, generator=generator).softmax(1)


def by_loops(logits, reference, weights=(1, 1, 1)):
    """Cross-entropy and Dice, voxel by voxel."""
    probability = logits.double().softmax(1)
    voxels = [values.movedim(1, -1).reshape(-1, 3) for values in (probability, reference.double())]
    rows = list(zip(*voxels, strict=True))
    entropy = -sum(
        weight * float(q * p.log()) for pair in rows for p, q, weight in zip(*pair, weights, strict=True)
    )
    dice = []
    for index in (1, 2):
        common = sum(float(p[index] + q[index] - abs(p[index] - q[index])) / 2 for p, q in rows)
        total = sum(float(p[index] + q[index]) for p, q in rows)
        dice.append(2 * common / total)
    mean_dice = (weights[1] * dice[0] + weights[2] * dice[1]) / (weights[1] + weights[2])
    return entropy / len(rows) + 1 - mean_dice


@pytest.mark.parametrize("weights", [(1, 1, 1), (0.5, 2, 3)])
def test_loss_equals_the_loops(weights):
    logits, reference = example()
    loss = SoftDiceCrossEntropy(smooth=0, class_weights=list(weights))
    assert float(loss(logits, reference)) == pytest.approx(by_loops(logits, reference, weights), rel=1e-5)


def test_of_hard_labels_it_is_dice_of_the_same_overlap_in_value_and_gradient():
    logits, _ = example()
    label = torch.randint(3, (2, 1, 4, 5), generator=torch.Generator().manual_seed(1))
    one_hot = F.one_hot(label[:, 0], 3).movedim(-1, 1).float()
    gradients = []
    for loss, reference in ((SoftDiceCrossEntropy(), one_hot), (DiceCrossEntropy(), label)):
        leaf = logits.clone().requires_grad_()
        value = loss(leaf, reference)
        value.backward()
        gradients.append((value.detach(), leaf.grad))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_it_is_lowest_where_the_prediction_is_the_label_unlike_the_usual_soft_dice():
    _, reference = example()
    loss = SoftDiceCrossEntropy(ce_weight=0)
    at_label = float(loss(reference.log(), reference))
    assert at_label == pytest.approx(0, abs=1e-5)
    for sharper in (2.0, 0.5):
        assert float(loss(sharper * reference.log(), reference)) > 0.02


def test_voxels_without_a_label_have_no_gradient():
    logits, reference = example()
    labelled = torch.rand(2, 1, 4, 5, generator=torch.Generator().manual_seed(2)) < 0.7
    logits.requires_grad_()
    SoftDiceCrossEntropy()(logits, reference, labelled=labelled).backward()
    assert not logits.grad[~labelled.expand_as(logits)].any()


def test_heads_of_deep_supervision_see_the_mean_of_the_voxels_that_they_cover():
    label = example((2, 3, 8, 8))[1][:, 1:]
    heads = [torch.randn(2, 3, size, size) for size in (8, 4)]
    fitted = FittedLoss(SoftDiceCrossEntropy(), TARGETS, 2)
    fine, coarse = (
        SoftDiceCrossEntropy()(head, TARGETS.reference(F.avg_pool2d(label, 8 // len(head[0, 0]))))
        for head in heads
    )
    torch.testing.assert_close(fitted(heads, label), (fine + coarse / 2) / 1.5)


def test_other_losses_are_refused_by_name():
    with pytest.raises(
        ValueError, match="DiceCrossEntropy is for .* but the data has soft targets; use loss=soft_"
    ):
        FittedLoss(DiceCrossEntropy(), TARGETS, 3)
    with pytest.raises(ValueError, match="SoftDiceCrossEntropy is for soft targets"):
        FittedLoss(SoftDiceCrossEntropy(), LabelMapTargets.of_classes(NAMES), 3)
    FittedLoss(torch.nn.CrossEntropyLoss(), TARGETS, 3)
