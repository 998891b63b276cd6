"""medconv/features/shape_losses/losses.py: the term beside cross-entropy and Dice; boundary, clDice, skeleton recall."""

import math
import os

import numpy as np
import pytest
import torch
from helpers import ranks
from helpers.loss_examples import target_example
from reference import losses as oracle

from medconv.features.shape_losses.losses import Boundary, ClDice, SkeletonRecall, soft_skeleton, whole_number
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets
from medconv.training.losses.fit import FittedLoss, LossArgumentError
from medconv.training.losses.segmentation import DiceCrossEntropy, foreground

CLASSES = LabelMapTargets.of_classes(["background", "a", "b"])
IGNORING = LabelMapTargets.of_classes(["background", "a", "b"], ignore=9)
REGIONS = RegionTargets(("tumour", "core"), ((1, 2), (2,)), None, (1, 2))
BOTH = RegionTargets(("tumour", "core"), ((1, 2), (2,)), 3, (1, 2))
ALL = [CLASSES, IGNORING, REGIONS, BOTH]
IDS = ["classes", "ignoring", "regions", "both"]
LOSSES = [ClDice(weight=0.7, iterations=2), SkeletonRecall(weight=0.7, iterations=2), Boundary(weight=0.7)]
NAMES = ["cldice", "skeleton_recall", "boundary"]


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
@pytest.mark.parametrize("targets", ALL, ids=IDS)
@pytest.mark.parametrize("shape", [(2, 9, 8), (1, 5, 6, 7)])
def test_the_term_is_added_to_cross_entropy_and_dice(targets, shape, loss):
    logits, label = target_example(targets, shape)
    reference = targets.reference(label)
    labelled = targets.labelled(label)
    everywhere = torch.ones_like(label, dtype=torch.bool)
    counted = everywhere if labelled is None else labelled
    probability, mask = foreground(logits, reference)
    expected = DiceCrossEntropy()(logits, reference, labelled)
    expected = expected + 0.7 * loss.term(probability * counted, mask * counted)
    fitted = FittedLoss(loss, targets, len(shape) - 1)
    torch.testing.assert_close(fitted(logits, label), expected)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_ignored_voxels_have_no_gradient_and_no_effect(loss):
    logits, label = target_example(IGNORING, (2, 12, 12))
    logits.requires_grad_()
    fitted = FittedLoss(loss, IGNORING, 2)
    value = fitted(logits, label)
    value.backward()
    ignored = (label == 9).expand_as(logits)
    assert not logits.grad[ignored].any() and logits.grad[~ignored].any()
    other = torch.where(ignored, 5.0, logits.detach())
    assert torch.equal(fitted(other, label), value.detach())


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
@pytest.mark.parametrize("label_value", [0, 1])
def test_the_gradient_is_finite(loss, label_value):
    """Also where a class is absent, and where the network is sure."""
    for scale in (0.0, 1e4):
        logits = (scale * torch.randn(2, 3, 8, 8)).requires_grad_()
        loss(logits, torch.full((2, 1, 8, 8), label_value)).backward()
        assert logits.grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_half_precision_is_computed_in_fp32(loss):
    logits, label = target_example(CLASSES, (2, 8, 8))
    expected = loss(logits.bfloat16().float(), label)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(logits.bfloat16(), label)
    assert value.dtype == torch.float32 and torch.equal(value, expected)


def test_a_weight_of_0_leaves_the_term_out():
    logits, label = target_example(CLASSES, (2, 8, 8))
    assert torch.equal(ClDice(weight=0)(logits, label), DiceCrossEntropy()(logits, label))
    with pytest.raises(ValueError, match="^weight must be a number of 0 or more, got -1"):
        ClDice(weight=-1)
    with pytest.raises(ValueError, match="^dice_weight must be a number of 0 or more"):
        ClDice(dice_weight=-1)


@pytest.mark.parametrize("value", [0, 2.0, True, "2"])
def test_whole_numbers_are_checked(value):
    with pytest.raises(ValueError, match=f"^iterations must be a whole number of at least 1, got {value}"):
        whole_number("iterations", value, least=1)


def _example(case):
    """A loss, logits, and a label that lacks class 2 in the first half of the batch."""
    logits, label = target_example(CLASSES, (4, 9, 8))
    label[:2][label[:2] == 2] = 0
    return LOSSES[NAMES.index(case)], logits.requires_grad_(), label


def _half_a_batch(rank, folder, case):
    """The gradient of a rank's half of the batch, averaged over the ranks as DDP does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    loss, logits, label = _example(case)
    mine = slice(2 * rank, 2 * rank + 2)
    loss(logits[mine], label[mine]).backward()
    torch.distributed.all_reduce(logits.grad)
    torch.save(logits.grad / 2, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("case", NAMES)
def test_two_processes_have_the_gradient_of_one(tmp_path, case):
    ranks.call(_half_a_batch, str(tmp_path), case)
    loss, logits, label = _example(case)
    loss(logits, label).backward()
    for rank in range(2):
        grad = torch.load(f"{tmp_path}/{rank}.pt", weights_only=True)
        torch.testing.assert_close(grad, logits.grad, rtol=1e-4, atol=1e-7)


def signed_distance_mm(mask, spacing_mm):
    """To the nearest voxel of the other kind; negative inside."""
    result = np.zeros(mask.shape)
    for place in np.ndindex(mask.shape):
        others = np.argwhere(mask != mask[place])
        steps_mm = (others - np.array(place)) * spacing_mm
        nearest_mm = np.sqrt((steps_mm**2).sum(1)).min()
        result[place] = -nearest_mm if mask[place] else nearest_mm
    return result


@pytest.mark.parametrize(("shape", "spacing_mm"), [((7, 6), (1.0, 2.5)), ((4, 5, 3), (3.0, 0.5, 1.0))])
def test_boundary_equals_the_loops(shape, spacing_mm):
    generator = torch.Generator().manual_seed(0)
    probability = torch.rand(2, 2, *shape, generator=generator)
    mask = (torch.rand(2, 2, *shape, generator=generator) < 0.3).float()
    diagonal_mm = math.dist(np.zeros(len(shape)), np.multiply(shape, spacing_mm))
    terms = []
    for sample, output in np.ndindex(2, 2):
        one_mask = mask[sample, output].numpy()
        distance = signed_distance_mm(one_mask > 0, spacing_mm) / diagonal_mm
        terms.append((distance * (probability[sample, output].numpy() - one_mask)).mean())
    value = Boundary(spacing_mm=spacing_mm).term(probability, mask)
    assert float(value) == pytest.approx(np.mean(terms), rel=1e-5)
    assert float(value) > 0 and float(Boundary().term(mask, mask)) == 0


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_without_a_surface_there_is_no_term(value):
    probability = torch.full((1, 1, 5, 5), 0.4)
    assert float(Boundary().term(probability, torch.full_like(probability, value))) == 0


def test_the_spacing_is_checked():
    with pytest.raises(ValueError, match="^spacing_mm must be positive numbers, got"):
        Boundary(spacing_mm=(1.0, 0.0))
    with pytest.raises(LossArgumentError, match="^spacing_mm must be 2 numbers, got 3"):
        Boundary(spacing_mm=(1.0, 1.0, 1.0))(torch.randn(1, 2, 4, 4), torch.ones(1, 1, 4, 4))


@pytest.mark.parametrize("shape", [(7, 9), (5, 4, 6), (1, 6, 5)])
@pytest.mark.parametrize("iterations", [1, 3])
def test_the_skeleton_equals_the_loops(shape, iterations):
    values = torch.rand(2, 2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    skeleton = soft_skeleton(values, iterations)
    for sample, channel in np.ndindex(2, 2):
        expected = oracle.soft_skeleton(values[sample, channel].numpy(), iterations)
        np.testing.assert_allclose(skeleton[sample, channel].numpy(), expected)


def test_the_gradient_of_the_skeleton_is_that_of_its_values():
    values = torch.rand(1, 1, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: soft_skeleton(v, 2), values.requires_grad_())


def test_cldice_follows_its_formula():
    """Of the skeletons, which equal the loops."""
    generator = torch.Generator().manual_seed(0)
    probability = torch.rand(2, 2, 6, 7, generator=generator)
    mask = (torch.rand(2, 2, 6, 7, generator=generator) < 0.6).float()
    predicted, true = (soft_skeleton(values, 3) for values in (probability, mask))
    terms = []
    for c in range(2):
        precision = ((predicted * mask)[:, c].sum() + 1) / (predicted[:, c].sum() + 1)
        sensitivity = ((true * probability)[:, c].sum() + 1) / (true[:, c].sum() + 1)
        terms.append(1 - 2 * precision * sensitivity / (precision + sensitivity))
    torch.testing.assert_close(ClDice(iterations=3).term(probability, mask), sum(terms) / 2)


def test_iterations_are_checked():
    with pytest.raises(ValueError, match="^iterations must be a whole number of at least 1, got 0"):
        ClDice(iterations=0)


def bar(width):
    mask = torch.zeros(1, 1, 16, 20)
    mask[:, :, 2 : 2 + width] = 1
    return mask


@pytest.mark.parametrize(("radius", "rows"), [(0, [6]), (1, [5, 6, 7]), (2, [4, 5, 6, 7, 8])])
def test_a_tube_is_the_middle_of_a_structure(radius, rows):
    tube = SkeletonRecall(tube_radius=radius).tube(bar(9))
    assert tube[0, 0].any(1).nonzero().flatten().tolist() == rows
    assert torch.equal(tube, tube.bool().float())


def test_a_tube_stays_within_a_thin_structure():
    assert torch.equal(SkeletonRecall(tube_radius=2).tube(bar(3)), bar(3))


def test_skeleton_recall_by_hand():
    """Half of a tube of 60 voxels is found; what is predicted elsewhere has no part in it."""
    prediction = torch.full((1, 1, 16, 20), 0.9)
    prediction[..., 10:] = 0
    expected = 1 - (0.9 * 30 + 1) / (60 + 1)
    assert float(SkeletonRecall().term(prediction, bar(3))) == pytest.approx(expected, rel=1e-6)


def test_classes_that_are_absent_are_left_out():
    mask = torch.cat([bar(3), torch.zeros_like(bar(3))], 1)
    prediction = torch.full_like(mask, 0.5)
    loss = SkeletonRecall()
    torch.testing.assert_close(loss.term(prediction, mask), loss.term(prediction[:, :1], mask[:, :1]))
    assert float(loss.term(prediction, torch.zeros_like(mask))) == 0


def test_no_gradient_passes_through_the_skeleton():
    prediction = torch.full((1, 1, 16, 20), 0.5, requires_grad=True)
    SkeletonRecall().term(prediction, bar(3)).backward()
    torch.testing.assert_close(prediction.grad, -bar(3) / 61)


def test_the_radius_is_checked():
    with pytest.raises(ValueError, match="^tube_radius must be a whole number of at least 0, got -1"):
        SkeletonRecall(tube_radius=-1)
