"""medconv/features/shape_losses/losses.py: the tube around a centreline, and its recall by hand."""

import pytest
import torch

from medconv.features.shape_losses.losses import SkeletonRecall


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


def test_the_term_by_hand():
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
