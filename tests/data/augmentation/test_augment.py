"""medconv/data/augmentation/augment.py: where things move in millimetres; a batch equals its samples."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers.augmentation import ALL, SHAPES, SPACING
from helpers.volumes import dice, rotation

from medconv.data.augmentation import spatial
from medconv.data.augmentation.augment import Augment, centre
from medconv.data.augmentation.parameters import INTENSITY, SPATIAL, Parameters

CONF = Path(__file__).parents[3] / "conf" / "augmentation"
SOME = {**ALL, "p": dict.fromkeys((*SPATIAL, *INTENSITY), 0.5), "mirror_axes": "all"}
MOVES = {**ALL, "p": dict.fromkeys(SPATIAL, 1.0)}
ELASTIC = {"elastic_mm": 2, "elastic_spacing_mm": 8}


def make(axes=3, seed=0, patch_size=None, **settings):
    return Augment(seed, settings.pop("spacing_mm", SPACING[:axes]), patch_size or SHAPES[axes], **settings)


def batch_of(numbers, axes=3, channels=2, dtype=torch.uint8, more=0):
    """Images that are `more` voxels larger than the patch, on all sides."""
    generator, shape = torch.Generator().manual_seed(0), [n + 2 * more for n in SHAPES[axes]]
    label = torch.randint(0, 4, (len(numbers), 1, *shape), generator=generator).to(dtype)
    image = torch.randn(len(numbers), channels, *shape, generator=generator)
    return {"image": image, "label": label, "sample": torch.tensor(numbers)}


def fixed(axes, count=1, channels=1, **changes):
    """Parameters that change nothing, except those given."""
    ones, none = torch.ones(count, channels), torch.zeros(count, channels)
    values = {
        "moved": torch.tensor([bool({"matrix", "shift", "elastic"} & changes.keys())]).repeat(count),
        "matrix": torch.eye(axes).repeat(count, 1, 1),
        "shift": torch.zeros(count, axes),
        "flips": torch.zeros(count, axes, dtype=torch.bool),
        "elastic": torch.zeros(count, axes, *(0,) * axes),
        "noise_std": torch.zeros(count),
        "noise_seed": torch.arange(count),
        "blur": torch.zeros(count, channels, axes),
        "simulate_low_resolution": torch.ones(count, channels, axes),
        "brightness": ones,
        "additive_brightness": none,
        "contrast": ones,
        "gamma_inverted": ones,
        "gamma": ones,
    }
    return Parameters(**{**values, **changes})


def positions_mm(shape, spacing_mm):
    """Positions of the voxels from the centre. Shape: (axes, *shape)."""
    axes = [(np.arange(n) + 0.5 - n / 2) * s for n, s in zip(shape, spacing_mm, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij"))


def gaussian(shape, spacing_mm, centre_mm, sigma_mm):
    away = positions_mm(shape, spacing_mm) - np.reshape(centre_mm, (-1, *(1,) * len(shape)))
    return torch.from_numpy(np.exp(-0.5 * (away**2).sum(0) / sigma_mm**2)).float()[None, None]


def in_voxels(matrix_mm, spacing_mm):
    return torch.tensor(matrix_mm * np.array(spacing_mm) / np.array(spacing_mm)[:, None]).float()[None]


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("settings", [ALL, SOME])
@pytest.mark.parametrize("more", [0, 4])
def test_a_batch_gives_the_same_as_its_samples_one_by_one(axes, settings, more):
    augment, batch = make(axes, 3, **settings), batch_of([4, 9, 2, 11, 5], axes, more=more)
    together = augment(batch)
    for i in range(5):
        alone = augment({key: value[i : i + 1] for key, value in batch.items()})
        torch.testing.assert_close(together["image"][i : i + 1], alone["image"], rtol=0, atol=1e-6)
        assert torch.equal(together["label"][i : i + 1], alone["label"])
    assert together["image"].shape == (5, 2, *SHAPES[axes])
    assert together["label"].shape == (5, 1, *SHAPES[axes])


@pytest.mark.parametrize("axes", [2, 3])
def test_all_samples_at_once_give_the_same_as_one_by_one(axes, monkeypatch):
    """As on an accelerator, but here on a CPU."""
    augment = make(axes, 3, **SOME, **ELASTIC, flip_label_pairs=[(1, 2)], left_right_axis=0)
    batch = batch_of(range(16), axes, more=3)
    one_by_one = augment(batch)
    monkeypatch.setattr(spatial, "ONE_BY_ONE", ())
    stack = augment(batch)
    torch.testing.assert_close(stack["image"], one_by_one["image"], rtol=1e-4, atol=1e-4)
    assert (stack["label"] != one_by_one["label"]).float().mean() < 1e-3  # ties of the nearest voxel


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gpu_gives_the_same_as_a_cpu(axes, dtype):
    """Without noise, because a GPU's generator draws other numbers."""
    settings = {**SOME, **ELASTIC, "p": {**SOME["p"], "noise": 0}}
    augment, batch = make(axes, 3, **settings), batch_of(range(16), axes, more=3)
    on_gpu = augment({k: v.to(dtype).cuda() if k == "image" else v.cuda() for k, v in batch.items()})
    on_cpu = augment(batch)
    torch.testing.assert_close(on_gpu["image"].float().cpu(), on_cpu["image"], rtol=0, atol=2e-2)
    assert (on_gpu["label"].cpu() != on_cpu["label"]).float().mean() < 1e-3
    assert on_gpu["image"].is_cuda and on_gpu["image"].dtype == dtype


@pytest.mark.parametrize("axes", [2, 3])
def test_samples_cropped_to_their_read_size_give_the_same(axes):
    """Workers read only what each sample shows; an accelerator gets `max_read_size` for all samples."""
    augment = make(axes, 1, **{**SOME, **ELASTIC, "p": {**SOME["p"], **dict.fromkeys(SPATIAL, 0.3)}})
    numbers = list(range(20))
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(20, 1, *augment.max_read_size, generator=generator)
    label = torch.randint(0, 4, (20, 1, *augment.max_read_size), generator=generator)
    full = augment({"image": image, "label": label, "sample": numbers})
    sizes = [augment.read_size(n) for n in numbers]
    assert len(set(sizes)) > 4 and SHAPES[axes] in sizes
    assert all(n <= most for size in sizes for n, most in zip(size, augment.max_read_size, strict=True))
    parts = [[centre(x[i], sizes[i]).clone() for i in numbers] for x in (image, label)]
    small = augment({"image": parts[0], "label": parts[1], "sample": numbers})
    torch.testing.assert_close(small["image"], full["image"], rtol=0, atol=1e-4)
    assert (small["label"] != full["label"]).float().mean() < 1e-3  # ties of the nearest voxel


@pytest.mark.parametrize("axes", [2, 3])
def test_read_size_includes_all_that_a_sample_shows(axes):
    """An image of ones stays one if `read_size` is below `max_read_size` along every axis."""
    augment = make(axes, 0, p={"rotation": 1, "scale": 1, "shift": 1}, rotation_deg=25, scale=(0.8, 1.1))
    for number in range(20):
        size = augment.read_size(number)
        ones = torch.ones(1, 1, *size)
        image, _ = augment.apply_spatial(ones, ones.to(torch.uint8), augment.sample([number]))
        inside = all(n < most for n, most in zip(size, augment.max_read_size, strict=True))
        assert not inside or image.min() > 0.999
        cut = centre(ones, [max(1, n - 6) for n in size])
        image, _ = augment.apply_spatial(cut, cut.to(torch.uint8), augment.sample([number]))
        assert image.min() < 0.5  # a smaller crop does not suffice


@pytest.mark.parametrize("axes", [2, 3])
def test_probabilities_of_zero_change_nothing(axes):
    batch = batch_of([0, 1], axes)
    out = make(axes)(batch)
    assert torch.equal(out["image"], batch["image"]) and torch.equal(out["label"], batch["label"])
    assert out["sample"] is batch["sample"]


@pytest.mark.parametrize("axes", [2, 3])
def test_parameters_that_do_nothing_change_nothing(axes):
    """The resampling itself: voxel centres come back as they were."""
    batch = batch_of([0, 1], axes)
    still = fixed(axes, 2, 2, moved=torch.tensor([True, True]))
    image, label = make(axes, **ALL).apply(batch["image"], batch["label"], still)
    torch.testing.assert_close(image, batch["image"], rtol=0, atol=1e-5)
    assert torch.equal(label, batch["label"])


def test_the_input_is_not_changed():
    batch = batch_of([0, 1, 2, 3])
    image, label = batch["image"].clone(), batch["label"].clone()
    for settings in (ALL, SOME, {"p": dict.fromkeys(INTENSITY, 1.0)}):
        make(**settings)(batch)
    assert torch.equal(batch["image"], image) and torch.equal(batch["label"], label)


def test_seed_and_sample_number_decide_the_result():
    batch = batch_of([7, 8])
    batch["image"][1], batch["label"][1] = batch["image"][0], batch["label"][0]
    first, again = make(seed=5, **ALL)(batch), make(seed=5, **ALL)(batch)
    assert torch.equal(first["image"], again["image"]) and torch.equal(first["label"], again["label"])
    assert not torch.equal(first["image"][0], first["image"][1])
    assert not torch.equal(first["label"][0], first["label"][1])
    assert not torch.equal(first["image"], make(seed=6, **ALL)(batch)["image"])
    swapped = make(seed=5, **ALL)({**batch, "sample": torch.tensor([8, 7])})
    torch.testing.assert_close(swapped["image"].flip(0), first["image"], rtol=0, atol=1e-6)


def test_a_prediction_can_be_moved_like_its_image():
    augment, batch = make(**ALL), batch_of([3])
    parameters = augment.sample([3], 2)
    prediction = batch["label"].float() * 10
    _, label = augment.apply(batch["image"], batch["label"], parameters)
    moved, same_label = augment.apply_spatial(prediction, batch["label"], parameters)
    assert torch.equal(same_label, label)
    # not 1: the prediction is interpolated linearly, the label by nearest neighbour
    assert dice(moved.numpy() > 15, label.numpy() > 1) > 0.7


@pytest.mark.parametrize("spacing", [(1.0, 1.0), (0.8, 2.0), (1.0, 1.0, 1.0), (0.7, 1.0, 1.9)])
def test_a_blob_lands_where_the_matrix_says_in_mm(spacing):
    """Output position p shows the input at matrix @ p + shift: q moves to inverse(matrix) @ (q - shift)."""
    axes = len(spacing)
    shape = tuple(round(extent / s) for extent, s in zip((60, 44, 50), spacing, strict=False))
    matrix = rotation((25, -15, 10))[:axes, :axes] if axes == 3 else rotation((30, 0, 0))[:2, :2]
    matrix = 1.1 * matrix
    share, before = np.array([0.05, -0.1, 0.08])[:axes], np.array([6.0, -5.0, 4.0])[:axes]
    after = np.linalg.inv(matrix) @ (before - share * np.array(shape) * spacing)
    parameters = fixed(axes, matrix=in_voxels(matrix, spacing), shift=torch.tensor(share).float()[None])
    image = gaussian(shape, spacing, before, 3.0)
    augment = make(axes, spacing_mm=spacing, patch_size=shape)
    out, label = augment.apply(image, (image > 0.5).to(torch.uint8), parameters)
    places = positions_mm(shape, spacing)
    for mass, tolerance in ((out[0, 0].numpy(), 0.05), (label[0, 0].numpy(), 0.4)):
        centre_of_mass = (places * mass).reshape(axes, -1).sum(1) / mass.sum()
        np.testing.assert_allclose(centre_of_mass, after, atol=tolerance)


def test_drawn_rotations_keep_a_ball_a_ball():
    """A rotation in voxels, of 1 x 1.2 x 2.5 mm, would deform it."""
    shape, spacing = (40, 44, 13), (1, 1.2, 2.5)
    ball = torch.from_numpy((positions_mm(shape, spacing) ** 2).sum(0) < 14**2)[None, None].to(torch.uint8)
    augment = make(spacing_mm=spacing, patch_size=shape, p={"rotation": 1}, rotation_deg=45)
    for number in range(4):
        image, label = augment.apply(ball.float(), ball, augment.sample([number]))
        overlaps = dice(label.numpy() > 0, ball.numpy() > 0), dice(image.numpy() > 0.5, ball.numpy() > 0)
        assert min(overlaps) > 0.94


@pytest.mark.parametrize("axis", range(3))
def test_a_shift_is_a_share_of_the_patch(axis):
    """A share of 2/14, 2/12 or 2/10 shifts by two voxels."""
    batch = batch_of([0], channels=1)
    size = SHAPES[3][axis]
    shift = torch.zeros(1, 3)
    shift[0, axis] = 2 / size
    image, label = make().apply(batch["image"], batch["label"], fixed(3, shift=shift))
    for out, source in ((image, batch["image"]), (label, batch["label"])):
        moved = source.narrow(2 + axis, 2, size - 2)
        torch.testing.assert_close(out.narrow(2 + axis, 0, size - 2), moved, rtol=0, atol=1e-4)
        assert out.narrow(2 + axis, size - 2, 2).abs().max() < 1e-5  # 0 comes in from outside


def test_shifts_across_thick_slices_are_whole_slices():
    image = torch.zeros(20, 1, 16, 16, 8)
    image[..., 4:] = 1
    augment = make(spacing_mm=(1, 1, 5), patch_size=(16, 16, 8), p={"shift": 1}, shift=0.2)
    drawn = augment.sample(range(20)).shift
    assert drawn[:, 2].mul(8).unique().tolist() == [-2, -1, 0, 1, 2]
    shifted = augment.apply_spatial(image, image.to(torch.uint8), augment.sample(range(20)))[0][
        :, :, 4:12, 4:12
    ]
    assert ((shifted - shifted.round()).abs() < 1e-4).all()


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_labels_keep_their_values_and_type(axes, dtype):
    batch = batch_of(range(8), axes, dtype=dtype)
    batch["label"][batch["label"] == 3] = 200 if dtype == torch.uint8 else 32767
    out = make(axes, **ALL)(batch)
    assert out["label"].dtype == dtype and out["label"].shape == batch["label"].shape
    assert set(out["label"].unique().tolist()) <= set(batch["label"].unique().tolist())
    assert not torch.equal(out["label"], batch["label"])
    assert out["image"].dtype == torch.float32 and out["image"].shape == batch["image"].shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_images_stay_half_precision(dtype):
    """Computed in float32 between: equal to rounding, also of values that squared would not fit into 16
    bits.
    """
    batch = batch_of(range(6))
    batch["image"] *= 300
    augment = make(2, patch_size=SHAPES[3], spacing_mm=SPACING, **ALL)
    full, half = augment(batch), augment({**batch, "image": batch["image"].to(dtype)})
    assert half["image"].dtype == dtype and torch.equal(half["label"], full["label"])
    error = (half["image"].float() - full["image"]).abs().max() / full["image"].abs().max()
    assert error < (1e-3 if dtype == torch.float16 else 8e-3)


@pytest.mark.parametrize("axes", [2, 3])
def test_image_and_label_move_together(axes):
    label = torch.zeros(6, 1, *(32,) * axes, dtype=torch.uint8)
    label[(..., slice(8, 26), slice(5, 20))] = 1
    batch = {"image": label.float(), "label": label, "sample": torch.arange(6)}
    settings = {**MOVES, "elastic_mm": 3, "elastic_spacing_mm": 12, "mirror_axes": "all"}
    out = make(axes, 1, (32,) * axes, **settings)(batch)
    for i in range(6):
        assert dice(out["image"][i].numpy() > 0.5, out["label"][i].numpy() > 0) > 0.97
        assert dice(label[i].numpy() > 0, out["label"][i].numpy() > 0) < 0.95


def test_elastic_deformation_is_smooth_and_at_most_elastic_mm():
    """An image of each voxel's own place shows where it was taken from."""
    shape, spacing = (36, 30, 24), (1.0, 1.2, 1.5)
    augment = make(
        spacing_mm=spacing, patch_size=shape, p={"elastic": 1}, elastic_mm=4, elastic_spacing_mm=12
    )
    assert augment.max_read_size == (46, 40, 32)  # 4 mm more on each side, and one voxel to interpolate from
    places = positions_mm([n + 12 for n in shape], spacing)
    image = torch.from_numpy(places).float()[None]
    label = torch.zeros(1, 1, *image.shape[2:], dtype=torch.uint8)
    still, largest = positions_mm(shape, spacing), []
    for number in range(12):
        moved = augment.apply_spatial(image, label, augment.sample([number], 3))[0][0].numpy() - still
        largest.append(np.abs(moved).max())
        slope = np.stack([np.gradient(moved[i], *spacing) for i in range(3)])
        assert np.linalg.det(np.moveaxis(slope, (0, 1), (-2, -1)) + np.eye(3)).min() > 0  # nothing folds over
    assert 2 < max(largest) <= 4.001 and min(largest) < 1


@pytest.mark.parametrize("axes", [2, 3])
def test_mirrored_samples_are_exact_flips_of_image_and_label(axes):
    augment, batch = make(axes, mirror_axes=[0, axes - 1]), batch_of(range(24), axes, more=2)
    out, patterns = augment(batch), set()
    image, label = centre(batch["image"], SHAPES[axes]), centre(batch["label"], SHAPES[axes])
    for i in range(24):
        flips = [[], [1], [axes], [1, axes]]
        matches = [n for n, dims in enumerate(flips) if torch.equal(out["image"][i], image[i].flip(dims))]
        assert len(matches) == 1 and torch.equal(out["label"][i], label[i].flip(flips[matches[0]]))
        patterns.update(matches)
    assert patterns == {0, 1, 2, 3}


@pytest.mark.parametrize("moves", [False, True])
def test_left_and_right_labels_swap_in_mirrored_samples(moves):
    generator, shape = torch.Generator().manual_seed(0), (16, 1, *SHAPES[3])
    label = torch.randint(0, 5, shape, generator=generator).to(torch.uint8)
    batch = {"image": torch.zeros(shape), "label": label, "sample": torch.arange(16)}
    settings = {"mirror_axes": [0, 1], **(MOVES if moves else {})}
    plain, paired = make(**settings), make(**settings, flip_label_pairs=[(1, 3), (2, 4)], left_right_axis=0)
    flips = plain.sample(range(16)).flips
    assert {tuple(f) for f in flips[:, :2].tolist()} == {(a, b) for a in (False, True) for b in (False, True)}
    before, after = plain(batch)["label"], paired(batch)["label"]
    table = torch.tensor([0, 3, 4, 1, 2], dtype=torch.uint8)
    for i in range(16):
        assert torch.equal(after[i], table[before[i].long()] if flips[i, 0] else before[i])


def test_presets_are_valid_and_change_the_expected_number_of_samples():
    for path in (CONF / f"{name}.yaml" for name in ("none", "light", "strong")):
        settings = yaml.safe_load(path.read_text())
        assert settings.pop("_target_") == "medconv.data.augmentation.augment.Augment"
        for axes in (2, 3):
            batch = batch_of(range(12), axes)
            images = zip(make(axes, **settings)(batch)["image"], batch["image"], strict=True)
            changed = sum(not torch.equal(augmented, image) for augmented, image in images)
            assert changed == {"none": 0, "light": 12}.get(path.stem, changed)
            assert changed > 6 or path.stem == "none"


@pytest.mark.parametrize("axes", [2, 3])
def test_probabilities_move_as_the_image_does_and_swap_their_classes(axes):
    """Linear interpolation: as channels of an image, up to the last bits of float16."""
    batch = batch_of(range(12), axes, more=2)
    probabilities = batch["image"].abs().clamp(max=1).half()
    rated = {**batch, "image": probabilities.float(), "label": probabilities}
    moving = {**MOVES, "mirror_axes": [0]}
    plain = make(axes, **moving)(rated)
    assert plain["label"].dtype == torch.float16 and plain["label"].shape == plain["image"].shape
    torch.testing.assert_close(plain["label"].float(), plain["image"], atol=1e-3, rtol=0)
    hard = make(axes, **moving)(batch)
    alone = make(axes, **moving)({**batch, "label": batch["label"].half()})
    assert alone["label"].unique().numel() > hard["label"].unique().numel()
    torch.testing.assert_close(alone["image"], hard["image"])
    flips = make(axes, **moving).sample(list(range(12)), 2).flips[:, 0]
    assert flips.any() and not flips.all()
    swapping = make(axes, **moving, flip_label_pairs=[(1, 2)], left_right_axis=0)(rated)
    torch.testing.assert_close(swapping["label"][flips], plain["label"][flips].flip(1))
    torch.testing.assert_close(swapping["label"][~flips], plain["label"][~flips])


def test_probabilities_of_samples_of_different_sizes_are_those_of_each():
    batch = batch_of([0, 1], more=3)
    image, label = batch["image"], batch["image"].abs().clamp(max=1).half()
    together = make(**SOME)({**batch, "image": image, "label": label})
    apart = make(**SOME)({**batch, "image": list(image), "label": list(label)})
    for key in ("image", "label"):
        torch.testing.assert_close(apart[key], together[key])
