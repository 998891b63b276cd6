"""medconv/features/shape_losses/losses.py: a term beside cross-entropy and Dice, for all kinds of label maps."""

import os

import pytest
import torch
from helpers import ranks
from helpers.loss_examples import target_example

from medconv.features.shape_losses.losses import Boundary, ClDice, SkeletonRecall, whole_number
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets
from medconv.training.losses.fit import FittedLoss
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
