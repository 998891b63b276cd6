"""medconv/features/shape_losses/losses.py: the soft skeleton against loops, and clDice by hand."""

import numpy as np
import pytest
import torch
from reference import losses as oracle

from medconv.features.shape_losses.losses import ClDice, dilated, soft_skeleton


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


def test_the_skeleton_of_a_bar_is_its_middle():
    """5 voxels wide: 2 erosions reach its middle, 1 does not; it goes on to the array's border."""
    mask = torch.zeros(1, 1, 11, 20)
    mask[:, :, 3:8] = 1
    middle = torch.zeros_like(mask)
    middle[:, :, 5] = 1
    assert torch.equal(soft_skeleton(mask, 2), middle)
    assert torch.equal(soft_skeleton(mask, 9), middle)
    assert not soft_skeleton(mask, 1).any()
    assert torch.equal(dilated(dilated(middle)), mask)


def test_the_term_by_hand():
    """A line of 10 voxels of which 6 are found, beside 3 false ones that no voxel of it touches."""
    mask, prediction = torch.zeros(2, 1, 1, 12, 10)
    mask[:, :, 2] = 1
    prediction[:, :, 2, :6] = 1
    prediction[:, :, 8, :3] = 1
    precision = (6 + 1) / (9 + 1)
    sensitivity = (6 + 1) / (10 + 1)
    expected = 1 - 2 * precision * sensitivity / (precision + sensitivity)
    assert float(ClDice().term(prediction, mask)) == pytest.approx(expected, rel=1e-6)


def test_a_gap_costs_more_than_as_many_voxels_at_the_side():
    mask = torch.zeros(1, 1, 12, 40)
    mask[:, :, 4:7] = 1
    gap, side = mask.clone(), mask.clone()
    gap[..., 10:14] = 0  # 12 voxels
    side[:, :, 4, 10:22] = 0
    assert ClDice().term(gap, mask) > 3 * ClDice().term(side, mask)
    assert float(ClDice().term(mask, mask)) == pytest.approx(0, abs=1e-6)


def test_iterations_are_checked():
    with pytest.raises(ValueError, match="^iterations must be a whole number of at least 1, got 0"):
        ClDice(iterations=0)
