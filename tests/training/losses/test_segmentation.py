"""medconv/training/losses/segmentation.py: against plain loops, and its sums in few passes."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ranks
from helpers.loss_examples import target_example
from reference.losses import dice_cross_entropy
from torch import Tensor, nn
from torch.distributed import nn as distributed_nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets
from medconv.training.losses.fit import FittedLoss
from medconv.training.losses.segmentation import DiceCrossEntropy, softmax_counts

CLASSES = LabelMapTargets.of_classes(["background", "a", "b"])
IGNORING = LabelMapTargets.of_classes(["background", "a", "b"], ignore=9)
REGIONS = RegionTargets(("tumour", "core"), ((1, 2), (2,)), None, (1, 2))
BOTH = RegionTargets(("tumour", "core"), ((1, 2), (2,)), 3, (1, 2))
TARGETS = {"classes": CLASSES, "ignoring": IGNORING, "regions": REGIONS, "both": BOTH}


def example(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(shape, generator=generator)
    return logits, torch.randint(0, shape[1], (shape[0], 1, *shape[2:]), generator=generator)


@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        ((2, 3, 4, 5), {}),
        ((1, 2, 3, 4, 2), {}),
        ((3, 4, 2, 3), {"dice_weight": 0.3, "ce_weight": 2.0}),
        ((2, 3, 3, 3), {"smooth": 1.5, "ce_weight": 0.0}),
        ((2, 3, 3, 3), {"dice_weight": 0.0}),
    ],
)
@pytest.mark.parametrize("label_dtype", [torch.uint8, torch.int64, torch.float32])
def test_loss_equals_the_loops(shape, arguments, label_dtype):
    logits, label = example(shape)
    expected = dice_cross_entropy(logits.double().numpy(), label.numpy(), **arguments)
    assert float(DiceCrossEntropy(**arguments)(logits, label.to(label_dtype))) == pytest.approx(
        expected, rel=1e-5
    )


def test_gradient_equals_that_of_the_loops():
    logits, label = example((2, 3, 2, 2))
    logits.requires_grad_()
    DiceCrossEntropy()(logits, label).backward()
    values, step = logits.detach().double().numpy(), 1e-5
    for place in np.ndindex(values.shape):
        up, down = values.copy(), values.copy()
        up[place] += step
        down[place] -= step
        slope = (dice_cross_entropy(up, label.numpy()) - dice_cross_entropy(down, label.numpy())) / (2 * step)
        assert float(logits.grad[place]) == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e4])
@pytest.mark.parametrize("background_only", [True, False])
def test_gradient_is_finite(scale, background_only):
    logits, label = example((2, 3, 4, 4))
    logits = (scale * logits).requires_grad_()
    loss = DiceCrossEntropy()(logits, label * (not background_only))
    loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all()


def test_half_precision_logits_are_computed_in_fp32():
    logits, label = example((2, 3, 8, 8))
    half = logits.bfloat16()
    expected = DiceCrossEntropy()(half.float(), label)
    assert torch.equal(DiceCrossEntropy()(half, label), expected)
    with torch.autocast("cpu", torch.bfloat16):
        autocasted = DiceCrossEntropy()(half, label)
    assert autocasted.dtype == torch.float32 and torch.equal(autocasted, expected)


def test_a_logit_of_minus_infinity_leaves_the_loss_finite():
    logits, label = torch.randn(2, 3, 4, 4), torch.randint(2, (2, 1, 4, 4))
    logits[:, 2] = -torch.inf
    loss = DiceCrossEntropy(dice_weight=0)(logits, label)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, label[:, 0]))


def _problem(case):
    """A loss, the parameters, the logits of a part of the batch, and the label of the batch."""
    if case in ("network", "samples"):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 1))
        image, label = torch.randn(4, 1, 7, 6), torch.randint(0, 3, (4, 1, 5, 4))
        label[:2][label[:2] == 2] = 0  # only the second process has class 2
        loss = DiceCrossEntropy(batch_dice=case == "network")
        return loss, list(network.parameters()), lambda part: network(image[part]), label
    targets = TARGETS[case]
    logits, label = target_example(targets, (4, 5, 6))
    ignored = torch.rand(label[:2].shape, generator=torch.Generator().manual_seed(1)) < 0.8
    label[:2][ignored] = targets.ignore  # the first process knows a fifth as many voxels
    logits.requires_grad_()
    return FittedLoss(DiceCrossEntropy(), targets, 2), [logits], lambda part: logits[part], label


def _known(case, part):
    """Outputs that samples of `_problem` annotate, as the loss takes them: one less in the second process."""
    annotated = torch.tensor([[True] * 3] * 2 + [[True, False, True]] * 2)
    return {"annotated": annotated[part]} if case == "ignoring" else {}


def _half_a_batch(rank, folder, case):
    """Loss and gradients of a rank's half of the batch, averaged over the ranks as DDP does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    loss, parameters, logits, label = _problem(case)
    mine = slice(2 * rank, 2 * rank + 2)
    value = loss(logits(mine), label[mine], **_known(case, mine))
    value.backward()
    mean = distributed_nn.functional.all_reduce(value.detach()) / 2
    for parameter in parameters:
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= 2
    torch.save({"loss": mean, "grads": [p.grad for p in parameters]}, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize(
    ("case", "atol"), [("network", 1e-6), ("samples", 1e-6), ("ignoring", 1e-7), ("both", 1e-7)]
)
def test_two_processes_have_the_gradient_of_one(tmp_path, case, atol):
    ranks.call(_half_a_batch, str(tmp_path), case)
    loss, parameters, logits, label = _problem(case)
    value = loss(logits(slice(None)), label, **_known(case, slice(None)))
    value.backward()
    for rank in range(2):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(saved["loss"], value.detach())
        for grad, parameter in zip(saved["grads"], parameters, strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("layout", ["classes", "regions"])
def test_without_batch_dice_samples_that_have_a_class_count_alike(layout):
    """However many voxels of it they have; a sample without it does not count."""
    logits, label = example((3, 3, 6, 5))
    label[0][label[0] == 2] = 0
    label[1, :, 1:] = 0  # with few voxels of both classes
    label[1, 0, 0, :2] = torch.tensor([1, 2])
    if layout == "regions":
        label = torch.cat([label == 1, label == 2, label > 0], 1)
    loss = DiceCrossEntropy(ce_weight=0, batch_dice=False)
    dice = []
    for channel in range(3) if layout == "regions" else (1, 2):
        of_class = label[:, channel] if layout == "regions" else label[:, 0] == channel
        probability = logits.sigmoid() if layout == "regions" else logits.softmax(1)
        own = [
            2 * (p * m).sum() / (p + m).sum()
            for p, m in zip(probability[:, channel], of_class.float(), strict=True)
        ]
        dice.append(torch.stack([value for value, m in zip(own, of_class, strict=True) if m.any()]).mean())
    torch.testing.assert_close(loss(logits, label), 1 - torch.stack(dice).mean(), rtol=1e-5, atol=1e-6)
    whole = DiceCrossEntropy(dice_weight=0)(logits, label)
    torch.testing.assert_close(DiceCrossEntropy(dice_weight=0, batch_dice=False)(logits, label), whole)


@pytest.mark.parametrize("batch_dice", [True, False])
@pytest.mark.parametrize("regions", [False, True])
def test_a_class_that_is_missed_for_certain_has_a_dice_of_0(batch_dice, regions):
    """Its probability is 0 in fp32 then, as that of a class which is not there."""
    label = torch.zeros(2, 1, 8, 8, dtype=torch.long)
    label[:, :, 2:5, 2:5] = 1
    logits = torch.zeros(2, 2, 8, 8)
    logits[:, 0] = 500
    loss = DiceCrossEntropy(ce_weight=0, batch_dice=batch_dice)
    if regions:
        logits, label = logits[:, 1:] - 500, label.bool()
    assert float(loss(logits, label)) == pytest.approx(1, abs=1e-4)


def test_weights_of_the_background_alone_leave_the_cross_entropy():
    logits, label = torch.randn(2, 3, 8, 8), torch.randint(0, 3, (2, 1, 8, 8))
    loss = DiceCrossEntropy(class_weights=[1, 0, 0])(logits, label)
    entropy = torch.where(label == 0, -logits.log_softmax(1)[:, :1], 0).mean()
    assert float(loss) == pytest.approx(float(entropy) + 1, rel=1e-5)


def test_without_batch_dice_a_batch_of_background_has_a_gradient_of_cross_entropy_alone():
    logits, label = example((2, 3, 4, 4))
    logits.requires_grad_()
    DiceCrossEntropy(batch_dice=False)(logits, 0 * label).backward()
    expected = logits.detach().clone().requires_grad_()
    DiceCrossEntropy(dice_weight=0)(expected, 0 * label).backward()
    torch.testing.assert_close(logits.grad, expected.grad)


def test_class_weights_in_double_precision():
    """`trainer.precision=64-true` makes the weights double, logits are computed in single precision."""
    logits, label = example((2, 3, 4, 4))
    loss = DiceCrossEntropy(class_weights=[1, 1, 5]).double()
    logits = logits.double().requires_grad_()
    loss(logits, label).backward()
    assert torch.isfinite(logits.grad).all()


def test_without_smoothing_a_class_that_no_voxel_can_have_counts_as_right():
    logits, label = example((2, 3, 4, 4))
    labelled = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    logits.requires_grad_()
    loss = DiceCrossEntropy(ce_weight=0.0, smooth=0.0)(logits, label, labelled)
    loss.backward()
    assert loss == 0 and (logits.grad == 0).all()


def test_class_weights_count_voxels_and_dice_of_a_class(tmp_path):
    """By hand, of softmax and of sigmoid; weights of 1 are none."""
    logits, label = example((2, 3, 4, 4))
    weights = torch.tensor([1.0, 1.0, 5.0])
    entropy = nn.functional.cross_entropy(logits, label[:, 0], weights, reduction="sum") / label.numel()
    chance, true = logits.softmax(1), torch.stack([label[:, 0] == c for c in range(3)], 1)
    both, sizes = (chance * true).sum((0, 2, 3))[1:], (chance + true.float()).sum((0, 2, 3))[1:]
    dice = (2 * both / sizes * torch.tensor([1.0, 5.0])).sum() / 6
    for setting in ({"b": 5}, [1, 1, 5]):
        loss = DiceCrossEntropy(class_weights=setting, class_names=["a", "b"])
        torch.testing.assert_close(loss(logits, label), entropy + 1 - dice, rtol=1e-4, atol=1e-5)
    plain = DiceCrossEntropy()(logits, label)
    torch.testing.assert_close(DiceCrossEntropy(class_weights=[1, 1, 1])(logits, label), plain)
    regions = REGIONS.reference(label)
    weighted = DiceCrossEntropy(0.0, class_weights={"core": 3}, class_names=REGIONS.names)(
        logits[:, :2], regions
    )
    per_region = nn.functional.binary_cross_entropy_with_logits(logits[:, :2], regions, reduction="none")
    torch.testing.assert_close(weighted, (per_region.mean((0, 2, 3)) * torch.tensor([1.0, 3.0])).mean())


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"c": 1}, "no class c; there are background, a, b"),
        ([1, -1, 2], "must be numbers of 0 or more"),
        ("balanced", "must be numbers of 0 or more"),
        ([1, 0, 0], "a class must have a weight above 0"),
        ([1, 2], "must be 3 numbers, one for each output, got 2"),
    ],
)
def test_wrong_class_weights_are_refused(setting, words):
    with pytest.raises(ValueError, match=f"^(loss: )?class_weights.*{words}"):
        FittedLoss(DiceCrossEntropy(class_weights=setting, class_names=["a", "b"]), CLASSES, 2)


NUM_CLASSES = 4
SHAPE = (2, NUM_CLASSES, 3, 5, 2)


def plain(logits, reference, labelled, class_weights):
    one_hot = torch.nn.functional.one_hot(reference[:, 0], NUM_CLASSES).movedim(-1, 1).to(logits.dtype)
    counted = (
        torch.ones_like(reference, dtype=logits.dtype) if labelled is None else labelled.to(logits.dtype)
    )
    weights = torch.ones(NUM_CLASSES) if class_weights is None else class_weights
    of_class = weights.to(logits.dtype).view(1, -1, 1, 1, 1)
    probability = logits.softmax(1) * counted
    entropy = -(logits.log_softmax(1) * one_hot * of_class * counted).sum()
    axes = (0, 2, 3, 4)
    return entropy, (probability * one_hot).sum(axes), (probability + one_hot * counted).sum(axes)


def inputs(masked, weighted):
    torch.manual_seed(0)
    logits = (3 * torch.randn(SHAPE, dtype=torch.float64)).requires_grad_()
    reference = torch.randint(0, NUM_CLASSES, (2, 1, *SHAPE[2:]))
    labelled = torch.rand(reference.shape) > 0.3 if masked else None
    class_weights = torch.tensor([1.0, 0.5, 2.0, 0.0]) if weighted else None
    return logits, reference, labelled, class_weights


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_and_gradients_equal_those_of_torchs_operations(masked, weighted):
    arguments = inputs(masked, weighted)
    for ours, expected in zip(softmax_counts(*arguments), plain(*arguments), strict=True):
        torch.testing.assert_close(ours, expected)
        # of a function that takes each class's sum differently
        factors = torch.arange(1.0, 1.0 + ours.numel(), dtype=torch.float64).view(ours.shape)
        gradients = [
            torch.autograd.grad((sums * factors).sum(), arguments[0], retain_graph=True)[0]
            for sums in (ours, expected)
        ]
        torch.testing.assert_close(*gradients)


def test_voxels_that_do_not_count_change_nothing():
    logits, reference, labelled, _ = inputs(masked=True, weighted=False)
    assert labelled is not None
    changed = torch.where(labelled, logits, 100.0)
    for first, second in zip(
        softmax_counts(logits, reference, labelled),
        softmax_counts(changed, (reference + ~labelled) % NUM_CLASSES, labelled),
        strict=True,
    ):
        torch.testing.assert_close(first, second)


def test_the_probabilities_alone_are_kept_for_the_backward_pass():
    """Torch's own operations keep several tensors of this size."""
    kept = []
    logits, reference, *_ = inputs(masked=False, weighted=False)

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        softmax_counts(logits, reference)
    assert sum(tensor.numel() == logits.numel() for tensor in kept) == 1
    assert all(tensor.data_ptr() != logits.data_ptr() for tensor in kept)


class Passes(TorchDispatchMode):
    """Counts reads and writes of tensors as large as the logits; an element for each voxel is not one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name in ("gather", "scatter_") or func.is_view or "empty" in name:
            return result
        read = [] if name == "zeros_like" else tree_leaves((args, kwargs))
        for tensor in [*read, *tree_leaves(result)]:
            self.count += isinstance(tensor, Tensor) and tensor.numel() == self.size
        return result


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_forward_and_backward_pass_over_the_logits_14_times(layout):
    """Whatever the device; torch's own softmax, cross-entropy and Dice take 35. Nothing is copied."""
    logits = torch.randn(2, 105, 3, 4, 5, device="meta").to(memory_format=layout).requires_grad_()
    reference = torch.zeros(2, 1, 3, 4, 5, dtype=torch.long, device="meta")
    with Passes(logits.numel()) as passes:
        entropy, intersection, sizes = softmax_counts(logits, reference)
        (entropy + intersection.sum() - sizes.sum()).backward()
    assert passes.count <= 14


def test_channels_last_logits_get_a_channels_last_gradient():
    logits, reference, *_ = inputs(masked=False, weighted=False)
    found = []
    for layout in (torch.contiguous_format, torch.channels_last_3d):
        formatted = logits.detach().contiguous(memory_format=layout).requires_grad_()
        entropy, intersection, sizes = softmax_counts(formatted, reference)
        (entropy + (intersection / sizes).sum()).backward()
        assert formatted.grad is not None and formatted.grad.stride() == formatted.stride()
        found.append(formatted.grad)
    torch.testing.assert_close(found[1], found[0])
