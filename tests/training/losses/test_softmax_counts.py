"""medconv/training/losses/segmentation.py: against torch's own operations."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medconv.training.losses.segmentation import softmax_counts

CLASSES = 4
SHAPE = (2, CLASSES, 3, 5, 2)


def plain(logits, reference, labelled, class_weights):
    one_hot = torch.nn.functional.one_hot(reference[:, 0], CLASSES).movedim(-1, 1).to(logits.dtype)
    counted = (
        torch.ones_like(reference, dtype=logits.dtype) if labelled is None else labelled.to(logits.dtype)
    )
    weights = torch.ones(CLASSES) if class_weights is None else class_weights
    of_class = weights.to(logits.dtype).view(1, -1, 1, 1, 1)
    probability = logits.softmax(1) * counted
    entropy = -(logits.log_softmax(1) * one_hot * of_class * counted).sum()
    axes = (0, 2, 3, 4)
    return entropy, (probability * one_hot).sum(axes), (probability + one_hot * counted).sum(axes)


def inputs(masked, weighted):
    torch.manual_seed(0)
    logits = (3 * torch.randn(SHAPE, dtype=torch.float64)).requires_grad_()
    reference = torch.randint(0, CLASSES, (2, 1, *SHAPE[2:]))
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


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_all_sums_together(masked):
    logits, *others = inputs(masked, weighted=True)
    assert torch.autograd.gradcheck(lambda values: softmax_counts(values, *others), logits)


def test_voxels_that_do_not_count_change_nothing():
    logits, reference, labelled, _ = inputs(masked=True, weighted=False)
    assert labelled is not None
    changed = torch.where(labelled, logits, 100.0)
    for first, second in zip(
        softmax_counts(logits, reference, labelled),
        softmax_counts(changed, (reference + ~labelled) % CLASSES, labelled),
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
