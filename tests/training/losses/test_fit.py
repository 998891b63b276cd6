"""medconv/training/losses/fit.py: which losses fit which targets, ignored voxels and coarse heads."""

import math
from functools import partial

import monai.losses
import pytest
import torch
from helpers.loss_examples import target_example
from reference.losses import dice_binary_cross_entropy, dice_cross_entropy
from torch import nn

from medconv.features.continuous.targets import ContinuousTargets
from medconv.features.image_level.losses import CrossEntropy, RegressionLoss
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets
from medconv.training.losses.fit import FittedLoss, is_weight
from medconv.training.losses.segmentation import DiceCrossEntropy

CLASSES = LabelMapTargets.of_classes(["background", "a", "b"])
IGNORING = LabelMapTargets.of_classes(["background", "a", "b"], ignore=9)
REGIONS = RegionTargets(("tumour", "core"), ((1, 2), (2,)), None, (1, 2))
BOTH = RegionTargets(("tumour", "core"), ((1, 2), (2,)), 3, (1, 2))
TARGETS = {"classes": CLASSES, "ignoring": IGNORING, "regions": REGIONS, "both": BOTH}


def fitted(loss, targets, spatial_dims=3):
    return FittedLoss(loss, targets, spatial_dims)


def make_loss(name, targets):
    """A loss of MONAI's with the settings of conf/loss; ours by its name."""
    if name == "DiceCrossEntropy":
        return DiceCrossEntropy()
    plain, masks = targets.exclusive, not targets.exclusive
    settings = {"include_background": masks, "to_onehot_y": plain, "softmax": plain, "sigmoid": masks}
    return getattr(monai.losses, name)(**settings, batch=True)


@pytest.mark.parametrize("shape", [(2, 4, 5), (1, 3, 4, 2)])
@pytest.mark.parametrize("weights", [{}, {"dice_weight": 0.3, "ce_weight": 2.0}])
@pytest.mark.parametrize("targets", [REGIONS, BOTH], ids=["regions", "both"])
def test_regions_equal_the_loops(targets, shape, weights):
    logits, label = target_example(targets, shape)
    masks = torch.cat([(label == 1) | (label == 2), label == 2], 1)
    labelled = (label != targets.ignore) if targets.ignore else torch.ones_like(label)
    expected = dice_binary_cross_entropy(logits.double().numpy(), masks.numpy(), labelled.numpy(), **weights)
    assert float(fitted(DiceCrossEntropy(**weights), targets)(logits, label)) == pytest.approx(
        expected, rel=1e-5
    )


def test_ignoring_equals_the_loops_over_labelled_voxels():
    logits, label = target_example(IGNORING)
    labelled = (label != 9)[:, 0]
    one_row = logits.movedim(1, -1)[labelled].T[None], label[:, 0][labelled][None, None]
    expected = dice_cross_entropy(one_row[0].double().numpy(), one_row[1].numpy())
    assert float(fitted(DiceCrossEntropy(), IGNORING)(logits, label)) == pytest.approx(expected, rel=1e-5)


LOSSES = ["DiceCrossEntropy", "TverskyLoss", "DiceFocalLoss", "DiceLoss", "GeneralizedDiceLoss"]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", ["ignoring", "both"])
def test_ignored_voxels_change_nothing_and_get_no_gradient(name, case):
    targets = TARGETS[case]
    loss = fitted(make_loss(name, targets), targets)
    logits, label = target_example(targets)
    ignored = (label == targets.ignore).expand_as(logits)
    other = torch.where(ignored, -3 * logits, logits)
    logits.requires_grad_()
    value = loss(logits, label)
    value.backward()
    assert torch.equal(logits.grad[ignored], torch.zeros(int(ignored.sum())))
    assert logits.grad[~ignored].ne(0).all()
    torch.testing.assert_close(loss(other, label), value.detach())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", ["ignoring", "both"])
def test_a_batch_without_labelled_voxels_gives_a_finite_loss(name, case):
    targets = TARGETS[case]
    loss = fitted(make_loss(name, targets), targets)
    logits, label = target_example(targets)
    logits.requires_grad_()
    value = loss(logits, torch.full_like(label, targets.ignore))
    value.backward()
    assert value.isfinite() and torch.equal(logits.grad, torch.zeros_like(logits))
    assert targets.cross_entropy(logits, torch.full_like(label, targets.ignore)) is None


@pytest.mark.parametrize("name", LOSSES[1:])
def test_monais_losses_get_the_label_map_of_plain_classes(name):
    logits, label = target_example(CLASSES)
    loss = make_loss(name, CLASSES)
    assert torch.equal(fitted(loss, CLASSES)(logits, label), loss(logits, label))


@pytest.mark.parametrize("name", LOSSES[1:])
def test_monais_losses_get_the_masks_of_regions(name):
    logits, label = target_example(REGIONS)
    masks = torch.cat([label > 0, label == 2], 1).float()
    loss = make_loss(name, REGIONS)
    torch.testing.assert_close(fitted(loss, REGIONS)(logits, label), loss(logits, masks))


@pytest.mark.parametrize(
    ("loss", "case", "message"),
    [
        (
            monai.losses.DiceLoss(to_onehot_y=True, softmax=True),
            "regions",
            r"loss: DiceLoss cannot take regions targets",
        ),
        (
            monai.losses.DiceLoss(to_onehot_y=True, softmax=True),
            "ignoring",
            r"DiceLoss changes when the voxels.*argument batch=true",
        ),
        (
            monai.losses.DiceLoss(sigmoid=True),
            "both",
            r"DiceLoss changes when the voxels of a batch are shuffled",
        ),
    ],
)
def test_a_loss_that_does_not_fit_the_targets_is_refused(loss, case, message):
    with pytest.raises(ValueError, match=message):
        fitted(loss, TARGETS[case])


@pytest.mark.parametrize("name", ["DiceFocalLoss", "TverskyLoss", "GeneralizedDiceLoss"])
def test_a_loss_of_overlap_is_not_for_intensities(name):
    targets = ContinuousTargets(("dose",))
    with pytest.raises(ValueError, match=rf"loss: {name} is for label_map .* but the data has continuous"):
        fitted(getattr(monai.losses, name)(sigmoid=True), targets)


@pytest.mark.parametrize("case", ["classes", "ignoring", "regions"])
def test_a_loss_that_is_nan_is_refused(case):
    def broken(logits, reference):
        return logits.mean() / 0 * 0

    with pytest.raises(ValueError, match=r"loss: broken is nan for .*, expected a finite number"):
        fitted(broken, TARGETS[case])


def test_a_loss_for_plain_classes_is_tried_on_random_numbers():
    message = r"loss: CrossEntropyLoss cannot take label_map targets: .*use loss=dice_ce"
    with pytest.raises(ValueError, match=message):
        fitted(nn.CrossEntropyLoss(), CLASSES, 3)


@pytest.mark.parametrize("case", ["classes", "ignoring", "regions"])
def test_a_loss_for_slices_is_tried_on_slices(case):
    def flat(logits, reference):
        if logits.ndim != 4:
            raise ValueError("2D alone")
        return DiceCrossEntropy()(logits, reference)

    fitted(flat, TARGETS[case], 2)
    with pytest.raises(ValueError, match=r"loss: flat cannot take .*: 2D alone"):
        fitted(flat, TARGETS[case], 3)


def test_a_loss_may_be_a_function():
    logits, label = target_example(REGIONS)
    function = partial(nn.functional.binary_cross_entropy_with_logits, reduction="mean")
    masks = torch.cat([label > 0, label == 2], 1).float()
    torch.testing.assert_close(fitted(function, REGIONS)(logits, label), function(logits, masks))


def test_coarse_heads_get_the_nearest_labels_and_half_the_weight():
    logits, label = target_example(BOTH, (1, 4, 6))
    coarse = torch.randn(1, 2, 2, 3)
    loss = fitted(DiceCrossEntropy(), BOTH)
    expected = (loss(logits, label) + 0.5 * loss(coarse, label[:, :, 1::2, 1::2])) / 1.5
    torch.testing.assert_close(loss([logits, coarse], label), expected)


@pytest.mark.parametrize("case", TARGETS)
def test_cross_entropy_is_the_mean_over_labelled_voxels(case):
    targets = TARGETS[case]
    logits, label = target_example(targets)
    expected = fitted(DiceCrossEntropy(dice_weight=0), targets)(logits, label)
    assert targets.cross_entropy(logits, label) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("loss", [CrossEntropy(), CrossEntropy(exclusive=False), RegressionLoss()])
def test_image_level_losses_do_not_fit_label_maps(loss):
    with pytest.raises(
        ValueError, match="is for .* targets, but the data has label_map targets; use loss=dice_ce"
    ):
        fitted(loss, CLASSES)


ONE_LACKS_A = torch.tensor([[True, True, True], [True, False, True]])


def test_a_class_that_is_not_annotated_joins_the_background():
    """The second sample alone: as classes background-or-a and b, whatever its label says of a."""
    logits, label = target_example(CLASSES)
    logits, label, known = logits[1:], label[1:], ONE_LACKS_A[1:]
    two = torch.cat([logits[:, :2].logsumexp(1, keepdim=True), logits[:, 2:]], 1)
    one_class = (label == 2).long()
    entropy = nn.functional.cross_entropy(two, one_class[:, 0])
    loss = fitted(DiceCrossEntropy(dice_weight=0.0), CLASSES, 2)
    torch.testing.assert_close(loss(logits, label, annotated=known), entropy)
    assert CLASSES.cross_entropy(logits, label, known[0].tolist()) == pytest.approx(float(entropy))
    chance = two.softmax(1)[:, 1:]
    dice = 2 * (chance * one_class).sum() / (chance.sum() + one_class.sum())
    loss = fitted(DiceCrossEntropy(ce_weight=0.0), CLASSES, 2)
    torch.testing.assert_close(
        loss(logits, label, annotated=known), 1 - (1 + dice) / 2
    )  # nothing is known of a


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", ["classes", "ignoring", "regions", "both"])
def test_labels_that_are_not_annotated_change_nothing(name, case):
    """Of the second sample, under deep supervision too; and without such labels the loss is that of always."""
    targets = TARGETS[case]
    loss, (logits, label) = fitted(make_loss(name, targets), targets, 2), target_example(targets, (2, 12, 12))
    heads, changed = [logits.requires_grad_(), logits[..., ::2, ::2].detach()], label.clone()
    known = torch.stack([torch.tensor(targets.annotated_outputs(values)) for values in ((1, 2), (2,))])
    assert known.tolist() == (
        [[True] * 3, [True, False, True]] if targets.exclusive else [[True] * 2, [False, True]]
    )
    changed[1][label[1] == 1] = 0
    value = loss(heads, label, annotated=known)
    value.backward()
    torch.testing.assert_close(loss(heads, changed, annotated=known), value.detach())
    assert abs(float(loss(heads, changed) - loss(heads, label))) > 1e-3
    assert logits.grad.isfinite().all() and logits.grad[0].any()
    if targets.exclusive:  # background and a share one gradient, by their probabilities
        background, a = logits.grad[1, 0], logits.grad[1, 1]
        torch.testing.assert_close(a, background * (logits[1, 1] - logits[1, 0]).exp().detach())
    else:
        assert not logits.grad[1, 0].any() and logits.grad[1, 1].any()
    torch.testing.assert_close(loss(heads, label, annotated=torch.ones_like(known)), loss(heads, label))


def test_the_loss_of_cases_that_lack_labels_compiles_into_one_graph():
    logits, label = target_example(CLASSES)
    loss = fitted(DiceCrossEntropy(), CLASSES, 2)
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(logits, label, annotated=ONE_LACKS_A), loss(logits, label, annotated=ONE_LACKS_A)
    )


def test_further_outputs_that_are_no_heads_are_refused():
    logits, label = target_example(CLASSES)
    for other in (torch.zeros(logits.shape[0], 8, *logits.shape[2:]), torch.zeros(())):
        with pytest.raises(
            ValueError, match="outputs of shapes .* in training; expected logits of 3 channels"
        ):
            fitted(DiceCrossEntropy(), CLASSES, 2)([logits, other], label)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, True), (2.5, True), (-1, False), (math.inf, False), (math.nan, False), (True, False), ("1", False)],
)
def test_weights_are_finite_numbers_of_0_or_more(value, expected):
    assert is_weight(value) is expected
