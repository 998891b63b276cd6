from itertools import cycle

import numpy as np
import pytest
import torch
from helpers.augmentation import ALL, SHAPES, SPACING

from medconv.data.augmentation.parameters import INTENSITY, SPATIAL, RandomParameters, between


def make(axes=3, seed=0, **settings):
    return RandomParameters(seed, **{"spacing_mm": SPACING[:axes], "patch_size": SHAPES[axes], **settings})


def test_drawn_parameters_stay_in_their_ranges_and_use_them():
    drawn = make(2, spacing_mm=(1, 1), **{**ALL, "p": {**ALL["p"], "elastic": 0}}).sample(range(500), 2)
    scale = torch.linalg.det(drawn.matrix).sqrt()
    assert 0.8 <= scale.min() < 0.82 and 1.22 < scale.max() <= 1.25
    angle = torch.rad2deg(torch.atan2(drawn.matrix[:, 1, 0], drawn.matrix[:, 0, 0]))
    assert -20 <= angle.min() < -19 and 19 < angle.max() <= 20
    product = drawn.matrix @ drawn.matrix.mT / scale[:, None, None] ** 2
    torch.testing.assert_close(product, torch.eye(2).expand_as(product), rtol=0, atol=1e-5)
    assert drawn.shift.shape == (500, 2)
    assert 0.095 < drawn.shift.max() <= 0.1 and -0.1 <= drawn.shift.min() < -0.095
    ranges = {
        **dict.fromkeys(("brightness", "contrast"), (0.75, 1.25)),
        **dict.fromkeys(("gamma", "gamma_inverted"), (0.7, 1.5)),
        "additive_brightness": (-0.2, 0.2),
        "noise_std": (0, 0.1),
        "blur": (0.5, 1),
        "simulate_low_resolution": (0.5, 1),
    }
    for name, (low, high) in ranges.items():
        values, near = getattr(drawn, name), 0.02 * (high - low)
        assert low <= values.min() < low + near and high - near < values.max() <= high, name
        if low < 1 < high:
            assert abs((values < 1).float().mean() - 0.5) < 0.05, name
        if name != "noise_std":
            assert not torch.equal(values[:, 0], values[:, 1]), name  # each channel by itself
    low_resolution = drawn.simulate_low_resolution
    assert torch.equal(low_resolution[..., 0], low_resolution[..., 1])  # axes alike, other than in blur
    assert not torch.equal(drawn.blur[..., 0], drawn.blur[..., 1])
    assert len(drawn.noise_seed.unique()) == 500


@pytest.mark.parametrize("name", (*SPATIAL, *INTENSITY))
def test_a_probability_sets_how_often_a_transform_occurs_and_nothing_else(name):
    """In 600 samples; the other transforms draw the same as if this one were certain."""
    settings = {**ALL, "elastic_spacing_mm": 30}
    certain = make(2, **settings).sample(range(600))
    drawn = make(2, **{**settings, "p": {**ALL["p"], name: 0.25}}).sample(range(600))
    if name in SPATIAL:
        changed = {"rotation": lambda d: d.matrix[:, 0, 1] != 0, "shift": lambda d: d.shift.any(1)}
        changed |= {
            "scale": lambda d: (torch.linalg.det(d.matrix) - 1).abs() > 1e-6,
            "elastic": lambda d: d.elastic.flatten(1).any(1),
        }
        share = changed[name](drawn).float().mean()
    else:
        field = {"noise": "noise_std"}.get(name, name)
        neutral = 0 if name in ("noise", "blur", "additive_brightness") else 1
        share = (getattr(drawn, field).reshape(600, -1)[:, 0] != neutral).float().mean()
    assert share == pytest.approx(0.25, abs=0.05)
    own = {"rotation": {"matrix"}, "scale": {"matrix"}, "noise": {"noise_std"}}.get(name, {name})
    for other in set(vars(drawn)) - own:
        assert torch.equal(getattr(drawn, other), getattr(certain, other)), other


def test_samples_are_resampled_only_if_they_move():
    assert not make(p={"noise": 1}).sample(range(9)).moved.any()
    for name in SPATIAL:
        assert make(p={name: 1}).sample(range(9)).moved.all()
    assert make(p={"noise": 1}).max_read_size == SHAPES[3] and make(p={"noise": 1}).read_size(0) == SHAPES[3]


def test_mirroring_changes_nothing_else_of_a_sample():
    plain = make(seed=5, **ALL).sample([3, 4, 5, 6])
    mirrored = make(seed=5, **ALL, mirror_axes=[0]).sample([3, 4, 5, 6])
    assert torch.equal(plain.matrix.abs(), mirrored.matrix.abs())
    assert not torch.equal(plain.matrix, mirrored.matrix)
    for name in set(vars(plain)) - {"matrix", "flips"}:
        assert torch.equal(getattr(plain, name), getattr(mirrored, name))


@pytest.mark.parametrize(
    ("spacing", "turns"), [((0.5, 0.5, 1.7), False), ((3.1, 1, 1), False), ((2, 2, 6), True)]
)
def test_images_are_not_resampled_across_thick_slices(spacing, turns):
    thick = int(np.argmax(spacing))
    augment = make(spacing_mm=spacing, patch_size=(20, 20, 20), **{**ALL, "shift": 0})
    drawn = augment.sample(range(20))
    others = [i for i in range(3) if i != thick]
    across = torch.cat([drawn.matrix[:, thick, others], drawn.matrix[:, others, thick]], dim=1)
    assert (across.abs().max() > 0.02) == turns
    assert drawn.matrix[:, others][:, :, others][:, 0, 1].abs().max() > 0.1
    for values, neutral in (
        (drawn.matrix[:, thick, thick], 1),
        (drawn.blur[..., thick], 0),
        (drawn.simulate_low_resolution[..., thick], 1),
    ):
        assert bool((values != neutral).any()) == turns
    assert bool(drawn.elastic[:, thick].any()) == turns and drawn.elastic[:, others[0]].any()
    assert turns or augment.max_read_size[thick] in (20, 22)


def test_max_read_size_is_that_of_a_patch_rotated_in_millimetres():
    """Half a side of 10 mm becomes 10 cos 30 + 10 sin 30 = 13.7 mm, and a voxel to interpolate from."""
    settings = {
        "spacing_mm": (1, 2),
        "patch_size": (20, 10),
        "rotation_deg": 30,
        "scale": (0.5, 3),
        "shift": 0.1,
    }
    assert make(2, p={"rotation": 1}, **settings).max_read_size == (30, 16)
    assert make(2, p={"scale": 1}, **settings).max_read_size == (28, 16)  # 1.25 at most
    assert make(2, p={"shift": 1}, **settings).max_read_size == (26, 14)
    diagonal = make(2, p={"rotation": 1}, **{**settings, "rotation_deg": 90})
    assert diagonal.max_read_size == (32, 18)
    assert make(2, p={"rotation": 1}, **{**settings, "spacing_mm": (1, 4)}).max_read_size == (22, 12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"p": {"rotate": 1}},
            r"p must be probabilities from 0 to 1 of rotation, scale, .*, got \['rotate'\]",
        ),
        ({"p": {"noise": 1.5}}, r"p must be probabilities from 0 to 1 .* 'noise': 1\.5"),
        ({"p": {"noise": float("nan")}}, r"p must be probabilities"),
        ({"p": {"noise": "often"}}, r"p must be probabilities"),
        ({"elastic_spacing_mm": 0}, r"elastic_spacing_mm must be above 0, got 0"),
        ({"scale": (0, 1)}, r"scale must be a range \[low, high\] from 0\.01 upwards, got \[0, 1\]"),
        ({"scale": (1.4, 0.7)}, r"scale must be a range"),
        ({"gamma": (0.7,)}, r"gamma must be a range .* got \[0\.7\]"),
        ({"scale": 2}, r"scale must be a range .* got \[2\]"),
        ({"noise_std": (-0.1, 1)}, r"noise_std must be a range .* from 0 upwards"),
        ({"blur_sigma": (0.5, float("inf"))}, r"blur_sigma must be a range"),
        (
            {"simulate_low_resolution": (0.5, 2)},
            r"simulate_low_resolution is a share of the voxels, at most 1, got \[0\.5, 2\]",
        ),
        ({"rotation_deg": -1}, r"rotation_deg must be 0 or more, got -1"),
        ({"shift": float("nan")}, r"shift must be 0 or more, got nan"),
        ({"p": {"elastic": 1}, "elastic_mm": 11}, r"elastic_mm must be at most 0\.4 of .* got 11 and 25"),
        (
            {"mirror_axes": [3]},
            r"mirror_axes must be different spatial axes from 0 to 2, or `all`, got \[3\]",
        ),
        ({"mirror_axes": [0, 0]}, r"mirror_axes must be different"),
        ({"mirror_axes": ["a"]}, r"mirror_axes must be different .* got \['a'\]"),
        ({"mirror_axes": 0}, r"mirror_axes must be different .* got 0"),
        ({"rotation_deg": "abc"}, r"rotation_deg must be 0 or more, got abc"),
        ({"scale": ("a", "b")}, r"scale must be a range"),
        ({"mirror_axes": "both"}, r"mirror_axes must be different .* got both"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_a_range_is_reached_from_its_lower_end():
    assert between(lambda: 0.0, (2, 4)) == 2 and between(lambda: 0.75, (2, 4)) == 3.5


@pytest.mark.parametrize(("numbers", "expected"), [((0.4, 0.5), 0.75), ((0.6, 0.5), 2.0)])
def test_a_factor_is_as_often_below_1_as_above(numbers, expected):
    assert between(cycle(numbers).__next__, (0.5, 3.0), is_factor=True) == expected


def test_a_rotation_turns_its_plane_alone():
    """The middle axis is thick, so the only plane is that of the others."""
    drawn = make(spacing_mm=(1, 4, 1), p={"rotation": 1}, rotation_deg=90).sample([2])
    matrix = drawn.matrix[0].double()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(3).double())
    assert torch.linalg.det(matrix).item() == pytest.approx(1)
    assert matrix[1].tolist() == [0, 1, 0] and matrix[:, 1].tolist() == [0, 1, 0]
    assert matrix[0, 2].abs() > 0.1
