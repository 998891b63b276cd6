"""medconv/training/losses/segmentation.py for regions that overlap and voxels to ignore: ours against
loops, MONAI's, and over two processes.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import monai.losses
import pytest
import torch
from helpers import ranks
from reference.losses import dice_binary_cross_entropy, dice_cross_entropy
from torch import Tensor, nn
from torch.distributed import nn as distributed_nn

from medconv.targets.segmentation import SegmentationTargets
from medconv.training.losses.segmentation import DiceCrossEntropy, SegmentationLoss, cross_entropy, over_heads

CLASSES = SegmentationTargets.of_classes(["background", "a", "b"])
IGNORING = SegmentationTargets.of_classes(["background", "a", "b"], ignore=9)
REGIONS = SegmentationTargets(("whole", "core"), ((1, 2), (2,)), (1, 2))
BOTH = SegmentationTargets(("whole", "core"), ((1, 2), (2,)), (1, 2), ignore=3)
ALL = {"classes": CLASSES, "ignoring": IGNORING, "regions": REGIONS, "both": BOTH}


def monais(name: str, targets: SegmentationTargets) -> nn.Module:
    """As conf/loss has it."""
    plain = not targets.overlapping
    how = {
        "include_background": not plain,
        "to_onehot_y": plain,
        "softmax": plain,
        "sigmoid": not plain,
        "batch": True,
    }
    return getattr(monai.losses, name)(**how)


def example(
    targets: SegmentationTargets, shape: tuple[int, ...] = (2, 5, 6), seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits, and a label map in which each value occurs; a third of it is to be ignored."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(shape[0], targets.num_outputs, *shape[1:], generator=draw)
    label = torch.randint(3, (shape[0], 1, *shape[1:]), generator=draw, dtype=torch.uint8)
    if targets.ignore is not None:
        label[torch.rand(label.shape, generator=draw) < 0.3] = targets.ignore
    return logits, label


@pytest.mark.parametrize("shape", [(2, 4, 5), (1, 3, 4, 2)])
@pytest.mark.parametrize("weights", [{}, {"dice_weight": 0.3, "ce_weight": 2.0}])
@pytest.mark.parametrize("targets", [REGIONS, BOTH], ids=["regions", "both"])
def test_regions_equal_the_loops(
    targets: SegmentationTargets, shape: tuple[int, ...], weights: dict[str, float]
) -> None:
    logits, label = example(targets, shape)
    masks = torch.cat([(label == 1) | (label == 2), label == 2], 1)
    known = (label != targets.ignore) if targets.ignore else torch.ones_like(label)
    expected = dice_binary_cross_entropy(logits.double().numpy(), masks.numpy(), known.numpy(), **weights)
    assert float(SegmentationLoss(DiceCrossEntropy(**weights), targets)(logits, label)) == pytest.approx(
        expected, rel=1e-5
    )


def test_ignoring_equals_the_loops_over_what_is_known() -> None:
    logits, label = example(IGNORING)
    known = (label != 9)[:, 0]
    one_row = logits.movedim(1, -1)[known].T[None], label[:, 0][known][None, None]
    expected = dice_cross_entropy(one_row[0].double().numpy(), one_row[1].numpy())
    assert float(SegmentationLoss(DiceCrossEntropy(), IGNORING)(logits, label)) == pytest.approx(
        expected, rel=1e-5
    )


LOSSES = ["DiceCrossEntropy", "TverskyLoss", "DiceFocalLoss", "DiceLoss", "GeneralizedDiceLoss"]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("which", ["ignoring", "both"])
def test_what_is_ignored_changes_nothing_and_gets_no_gradient(name: str, which: str) -> None:
    targets = ALL[which]
    loss = SegmentationLoss(
        DiceCrossEntropy() if name == "DiceCrossEntropy" else monais(name, targets), targets
    )
    logits, label = example(targets)
    ignored = (label == targets.ignore).expand_as(logits)
    other = torch.where(ignored, -3 * logits, logits)
    logits.requires_grad_()
    value = loss(logits, label)
    value.backward()
    assert torch.equal(logits.grad[ignored], torch.zeros(int(ignored.sum())))
    assert logits.grad[~ignored].ne(0).all()
    torch.testing.assert_close(loss(other, label), value.detach())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("which", ["ignoring", "both"])
def test_a_batch_of_which_nothing_is_known_gives_a_finite_loss(name: str, which: str) -> None:
    targets = ALL[which]
    loss = SegmentationLoss(
        DiceCrossEntropy() if name == "DiceCrossEntropy" else monais(name, targets), targets
    )
    logits, label = example(targets)
    logits.requires_grad_()
    value = loss(logits, torch.full_like(label, targets.ignore))
    value.backward()
    assert value.isfinite() and torch.equal(logits.grad, torch.zeros_like(logits))
    assert cross_entropy(logits, torch.full_like(label, targets.ignore), targets) is None


@pytest.mark.parametrize("name", LOSSES[1:])
def test_monais_losses_of_classes_are_untouched(name: str) -> None:
    logits, label = example(CLASSES)
    assert torch.equal(
        SegmentationLoss(monais(name, CLASSES), CLASSES)(logits, label), monais(name, CLASSES)(logits, label)
    )


@pytest.mark.parametrize("name", LOSSES[1:])
def test_monais_losses_see_the_masks_of_regions(name: str) -> None:
    logits, label = example(REGIONS)
    masks = torch.cat([label > 0, label == 2], 1).float()
    found = SegmentationLoss(monais(name, REGIONS), REGIONS)(logits, label)
    torch.testing.assert_close(found, monais(name, REGIONS)(logits, masks))


@pytest.mark.parametrize(
    ("loss", "which", "message"),
    [
        (
            monai.losses.DiceLoss(to_onehot_y=True, softmax=True),
            "regions",
            r"loss: DiceLoss cannot take overlapping regions",
        ),
        (
            monai.losses.DiceLoss(to_onehot_y=True, softmax=True),
            "ignoring",
            r"DiceLoss changes when the voxels.*loss\.batch=true",
        ),
        (
            monai.losses.DiceLoss(sigmoid=True),
            "both",
            r"DiceLoss changes when the voxels of a batch are shuffled",
        ),
    ],
)
def test_a_loss_that_cannot_is_refused(loss: nn.Module, which: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentationLoss(loss, ALL[which])


@pytest.mark.parametrize("which", ["classes", "ignoring", "regions"])
def test_a_loss_that_gives_no_number_is_refused(which: str) -> None:
    def broken(logits: Tensor, reference: Tensor) -> Tensor:
        return logits.mean() / 0 * 0

    with pytest.raises(ValueError, match=r"loss: broken is nan for .*, expected a finite number"):
        SegmentationLoss(broken, ALL[which])


def test_a_loss_of_plain_classes_is_tried_too() -> None:
    words = r"loss: CrossEntropyLoss cannot take classes, as a label map \(batch, 1, x, y, z\): "
    with pytest.raises(ValueError, match=words):
        SegmentationLoss(nn.CrossEntropyLoss(), CLASSES, 3)


@pytest.mark.parametrize("which", ["classes", "ignoring", "regions"])
def test_a_loss_for_slices_is_tried_on_slices(which: str) -> None:
    def flat(logits: Tensor, reference: Tensor) -> Tensor:
        if logits.ndim != 4:
            raise ValueError("2D alone")
        return DiceCrossEntropy()(logits, reference)

    for dims in (2, None):
        SegmentationLoss(flat, ALL[which], dims)
    with pytest.raises(ValueError, match=r"loss: flat cannot take .*: 2D alone"):
        SegmentationLoss(flat, ALL[which], 3)


def test_a_loss_may_be_a_function() -> None:
    logits, label = example(REGIONS)
    function = partial(nn.functional.binary_cross_entropy_with_logits, reduction="mean")
    masks = torch.cat([label > 0, label == 2], 1).float()
    torch.testing.assert_close(SegmentationLoss(function, REGIONS)(logits, label), function(logits, masks))


def test_coarse_heads_see_the_nearest_labels_and_what_is_ignored_among_them() -> None:
    logits, label = example(BOTH, (1, 4, 6))
    coarse = torch.randn(1, 2, 2, 3)
    loss = SegmentationLoss(DiceCrossEntropy(), BOTH)
    expected = (loss(logits, label) + 0.5 * loss(coarse, label[:, :, ::2, ::2])) / 1.5
    torch.testing.assert_close(over_heads(loss, [logits, coarse], label, 2), expected)


@pytest.mark.parametrize("which", ALL)
def test_validation_entropy_is_the_mean_over_what_is_known(which: str) -> None:
    targets = ALL[which]
    logits, label = example(targets)
    expected = SegmentationLoss(DiceCrossEntropy(dice_weight=0), targets)(logits, label)
    assert cross_entropy(logits, label, targets) == pytest.approx(float(expected), rel=1e-5)


def test_decoding_the_reference_gives_the_label_back() -> None:
    _, label = example(REGIONS)
    masks = REGIONS.reference(label)
    assert torch.equal(REGIONS.decode(2 * masks[0] - 1), label[0, 0].to(torch.int16))


def _half_a_batch(rank: int, folder: str, which: str) -> None:
    """Rank's share of the batch, gradients averaged as DDP does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    loss, logits, label = _problem(which)
    mine = slice(2 * rank, 2 * rank + 2)
    value = loss(logits[mine], label[mine])
    value.backward()
    mean = distributed_nn.functional.all_reduce(value.detach()) / 2
    torch.save({"loss": mean, "grad": logits.grad[mine] / 2}, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _problem(which: str) -> tuple[Any, Tensor, Tensor]:
    logits, label = example(ALL[which], (4, 5, 6))
    if which != "regions":
        label[:2][torch.rand(label[:2].shape, generator=torch.Generator().manual_seed(1)) < 0.8] = ALL[
            which
        ].ignore
    return SegmentationLoss(DiceCrossEntropy(), ALL[which]), logits.requires_grad_(), label


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("which", ["ignoring", "both"])
def test_two_processes_have_the_gradient_of_one(tmp_path: Path, which: str) -> None:
    """Although the first of them knows a fifth as much."""
    ranks.call(_half_a_batch, str(tmp_path), which)
    loss, logits, label = _problem(which)
    value = loss(logits, label)
    value.backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found["loss"], value.detach())
        torch.testing.assert_close(found["grad"], logits.grad[2 * rank : 2 * rank + 2], rtol=1e-4, atol=1e-7)
