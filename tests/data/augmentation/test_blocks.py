"""medconv/data/augmentation/blocks.py: blocks hold all that a patch shows, once, and little more."""

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from medconv.data.augmentation.augment import Augment
from medconv.data.augmentation.blocks import whole
from medconv.data.augmentation.parameters import rotated_half, size_that_holds

CONF = Path(__file__).parents[3] / "conf" / "augmentation"
SIZES = {2: (64, 50), 3: (32, 28, 24)}
ELASTIC = {"elastic_mm": 3, "elastic_spacing_mm": 10}


def preset(name, patch_size, **changes):
    settings = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    del settings["_target_"]
    settings["p"].update(changes)
    return Augment(0, (1.0,) * len(patch_size), patch_size, **settings)


def counted(blocks, shape):
    """In how many blocks each voxel lies."""
    counts = np.zeros(shape, int)
    for begin, end in zip(blocks.begin, blocks.end, strict=True):
        assert (begin >= 0).all() and (end <= shape).all() and (begin < end).all()
        counts[tuple(map(slice, begin, end))] += 1
    return counts


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("p", [dict.fromkeys(("rotation", "scale", "shift", "elastic"), 0.6), {}])
def test_a_sample_shows_nothing_outside_of_its_blocks(axes, p):
    """Other values outside change nothing, and inside they do."""
    augment = Augment(1, (1, 1.5, 1)[:axes], SIZES[axes], p=p, mirror_axes="all", **ELASTIC)
    box = torch.rand(1, 1, *augment.max_read_size, generator=torch.Generator().manual_seed(0))
    for number in range(12):
        parameters = augment.sample([number])
        counts = counted(augment.read_blocks(number), augment.max_read_size)
        assert counts.max() == 1
        inside = torch.from_numpy(counts == 1)
        expected, _ = augment.apply_spatial(box, None, parameters)
        found, _ = augment.apply_spatial(torch.where(inside, box, 1e6), None, parameters)
        assert torch.equal(found, expected)
        other, _ = augment.apply_spatial(torch.where(inside, 1e6, box), None, parameters)
        assert (other != expected).float().mean() > 0.9


@pytest.mark.parametrize("name", ["light", "strong"])
@pytest.mark.parametrize("patch_size", [(96, 96, 96), (32, 32, 32), (224, 224)])
def test_blocks_have_little_more_voxels_than_the_patch(name, patch_size):
    augment = preset(name, patch_size)
    voxels = [augment.read_blocks(number).voxels for number in range(24)]
    assert np.mean(voxels) < 1.5 * prod(patch_size)
    assert max(voxels) < 2.5 * prod(patch_size) < prod(augment.max_read_size)


def test_thick_axes_are_read_no_further_than_they_are_shown():
    augment = Augment(0, (1, 1, 6), (32, 32, 8), p={"rotation": 1, "scale": 1})
    for number in range(6):
        blocks = augment.read_blocks(number)
        assert blocks.begin[:, 2].min() >= 0 and blocks.end[:, 2].max() <= augment.max_read_size[2]
        assert (blocks.end - blocks.begin)[:, 2].max() <= 8 + 2  # and the neighbours


def test_blocks_are_cut_to_an_array_and_moved():
    blocks = whole((4, 6)).shifted((-2, 3))
    assert blocks.voxels == 24
    inside = blocks.inside((5, 5))
    assert (inside.begin.tolist(), inside.end.tolist()) == ([[0, 3]], [[2, 5]]) and inside.voxels == 4
    assert blocks.shifted((-2, 0)).inside((5, 5)).voxels == 0


def _farthest(half, spacing, angles):
    """The corners of a rectangle, turned by each angle, along each axis; in voxels."""
    corners = np.array([[1, 1], [1, -1]]) * half * spacing  # mm
    turns = np.stack([np.cos(angles), -np.sin(angles), np.sin(angles), np.cos(angles)], -1).reshape(-1, 2, 2)
    turned = np.einsum("tij,cj->tci", turns, corners)
    return abs(turned).max((0, 1)) / spacing


@pytest.mark.parametrize("degrees", [0.0, 20.0, 60.0, 180.0])
@pytest.mark.parametrize("spacing", [(1.0, 1.0), (0.5, 1.2)])
def test_rotated_corners_are_as_far_as_the_farthest_of_many_angles(degrees, spacing):
    patch = (40, 24)
    angles = np.deg2rad(np.linspace(-degrees, degrees, 20001))
    expected = _farthest(np.array(patch) / 2, np.array(spacing), angles)
    distance = rotated_half(patch, spacing, degrees, np.array([True, True]))
    np.testing.assert_allclose(distance, expected, rtol=1e-6)


def test_an_axis_that_does_not_rotate_keeps_its_half():
    distance = rotated_half((40, 24, 8), (1, 1, 5), 30.0, np.array([True, True, False]))
    assert distance[2] == 4
    assert (distance[:2] > [20, 12]).all()


def test_a_size_has_the_centre_of_the_patch_and_a_voxel_to_interpolate_from():
    assert size_that_holds((8, 7), np.array([4.0, 3.5])) == (10, 9)
    assert size_that_holds((8, 7), np.array([6.5, 3.6])) == (16, 11)
