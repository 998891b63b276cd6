"""medconv/training/losses/softmax_counts.py: against torch's own operations."""

import pytest
import torch
from torch import Tensor

from medconv.training.losses.softmax_counts import softmax_counts

CLASSES = 4
SHAPE = (2, CLASSES, 3, 5, 2)


def plain(
    logits: Tensor, reference: Tensor, labelled: Tensor | None, class_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
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


def inputs(masked: bool, weighted: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    torch.manual_seed(0)
    logits = (3 * torch.randn(SHAPE, dtype=torch.float64)).requires_grad_()
    reference = torch.randint(0, CLASSES, (2, 1, *SHAPE[2:]))
    labelled = torch.rand(reference.shape) > 0.3 if masked else None
    class_weights = torch.tensor([1.0, 0.5, 2.0, 0.0]) if weighted else None
    return logits, reference, labelled, class_weights


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_and_gradients_equal_those_of_torchs_operations(masked: bool, weighted: bool) -> None:
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
def test_gradients_of_all_sums_together(masked: bool) -> None:
    logits, *others = inputs(masked, weighted=True)
    assert torch.autograd.gradcheck(lambda values: softmax_counts(values, *others), logits)


def test_voxels_that_do_not_count_change_nothing() -> None:
    logits, reference, labelled, _ = inputs(masked=True, weighted=False)
    assert labelled is not None
    changed = torch.where(labelled, logits, 100.0)
    for first, second in zip(
        softmax_counts(logits, reference, labelled),
        softmax_counts(changed, (reference + ~labelled) % CLASSES, labelled),
        strict=True,
    ):
        torch.testing.assert_close(first, second)


def test_the_probabilities_alone_are_kept_for_the_backward_pass() -> None:
    """Torch's own operations keep several tensors of this size."""
    kept: list[Tensor] = []
    logits, reference, *_ = inputs(masked=False, weighted=False)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        softmax_counts(logits, reference)
    assert sum(tensor.numel() == logits.numel() for tensor in kept) == 1
    assert all(tensor.data_ptr() != logits.data_ptr() for tensor in kept)
