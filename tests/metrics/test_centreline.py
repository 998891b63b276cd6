"""medconv/metrics/centreline.py: clDice of tubes whose centrelines are known."""

import sys

import numpy as np
import pytest

from medconv.metrics import centreline
from medconv.metrics.segmentation import MetricSelection


def tube(shape, start, end, radius):
    """A bar along the first axis, in the middle of the others."""
    mask = np.zeros(shape, bool)
    middle = [slice(edge // 2 - radius, edge // 2 + radius + 1) for edge in shape[1:]]
    mask[(slice(start, end), *middle)] = True
    return mask


def cldice(prediction, reference):
    lines = centreline.skeleton(prediction), centreline.skeleton(reference)
    return centreline.cldice(prediction, reference, *lines)


@pytest.mark.parametrize("shape", [(40, 15), (40, 15, 15)])
def test_a_centreline_is_in_the_middle_and_one_voxel_wide(shape):
    mask = tube(shape, 5, 35, 2)
    line = centreline.skeleton(mask)
    assert (line.reshape(40, -1).sum(1)[10:30] == 1).all()
    assert line[(slice(10, 30), *[7] * (len(shape) - 1))].all()
    assert not (line & ~mask).any()


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("height", [2, 4, 5])
def test_no_width_makes_a_centreline_vanish(width, height):
    mask = np.zeros((40, 15, 15), bool)
    mask[5:35, 4 : 4 + width, 6 : 6 + height] = True
    line = centreline.skeleton(mask)
    assert not (line & ~mask).any()
    assert (line.reshape(40, -1).sum(1)[10:30] == 1).all()


def test_a_part_of_even_width_keeps_its_centreline():
    mask = np.zeros((40, 12, 12), bool)
    mask[2:20, 4:6, 4:6] = True
    mask[20:38, 4:7, 4:7] = True
    per_plane = centreline.skeleton(mask).reshape(40, -1).sum(1)
    assert (per_plane[4:36] == 1).sum() >= 28  # without the narrow part: 16


@pytest.mark.parametrize("shape", [(40, 15), (40, 15, 15)])
def test_a_thicker_prediction_of_the_right_course_is_not_punished(shape):
    thin = tube(shape, 5, 35, 1)
    thick = tube(shape, 5, 35, 3)
    assert cldice(thick, thin) == pytest.approx(1.0)
    overlap = 2 * (thin & thick).sum() / (thin.sum() + thick.sum())
    assert overlap < 0.8


def test_a_gap_costs_its_share_of_the_reference():
    reference = tube((40, 15, 15), 0, 40, 0)
    broken = reference.copy()
    broken[10:20] = False
    # all of the prediction is right, and three quarters of the reference are found
    assert cldice(broken, reference) == pytest.approx(2 * 0.75 / 1.75)


def test_a_line_beside_the_other_is_0():
    reference = tube((40, 15, 15), 0, 40, 0)
    assert cldice(np.roll(reference, 3, 1), reference) == 0.0


def test_the_missing_package_is_named_before_any_case_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage", None)
    message = r"^measuring centrelines needs the package skimage: pip install 'medconv\[centreline\]'"
    with pytest.raises(ValueError, match=message):
        MetricSelection(centreline=True)
