"""medconv/features/shape_losses/losses.py: signed distances from a surface, against every pair of voxels."""

import math

import numpy as np
import pytest
import torch

from medconv.features.shape_losses.losses import Boundary
from medconv.training.losses.fit import LossArgumentError


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
def test_the_term_equals_the_loops(shape, spacing_mm):
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


def test_a_false_voxel_costs_more_far_away():
    mask = torch.zeros(1, 1, 10, 30)
    mask[..., 4:7, 3:6] = 1
    near, far = mask.clone(), mask.clone()
    near[..., 5, 7] = 1
    far[..., 5, 25] = 1
    assert float(Boundary().term(far, mask)) == pytest.approx(10 * float(Boundary().term(near, mask)))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_without_a_surface_there_is_no_term(value):
    probability = torch.full((1, 1, 5, 5), 0.4)
    assert float(Boundary().term(probability, torch.full_like(probability, value))) == 0


def test_the_spacing_is_checked():
    with pytest.raises(ValueError, match="^spacing_mm must be positive numbers, got"):
        Boundary(spacing_mm=(1.0, 0.0))
    with pytest.raises(LossArgumentError, match="^spacing_mm must be 2 numbers, got 3"):
        Boundary(spacing_mm=(1.0, 1.0, 1.0))(torch.randn(1, 2, 4, 4), torch.ones(1, 1, 4, 4))
