"""medconv/data/augmentation/augment.py: where things move, in millimetres, and that a batch is nothing but
its samples.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers.volumes import dice, rotation
from torch import Tensor

from medconv.data.augmentation import spatial
from medconv.data.augmentation.augment import Augment, centre
from medconv.data.augmentation.parameters import PLACE, VALUES, Parameters

CONF = Path(__file__).parents[3] / "conf" / "augmentation"
ALL: dict[str, Any] = {
    "p": dict.fromkeys((*PLACE, *VALUES), 1.0),
    "rotation_deg": 20,
    "scale": (0.8, 1.25),
    "shift": 0.1,
}
SOME: dict[str, Any] = {**ALL, "p": dict.fromkeys((*PLACE, *VALUES), 0.5), "mirror_axes": "all"}
MOVES: dict[str, Any] = {**ALL, "p": dict.fromkeys(PLACE, 1.0)}
SHAPES = {2: (20, 17), 3: (14, 12, 10)}
SPACING = (1, 1.5, 2)


def make(axes: int = 3, seed: int = 0, patch_size: Sequence[int] | None = None, **settings: Any) -> Augment:
    return Augment(seed, settings.pop("spacing_mm", SPACING[:axes]), patch_size or SHAPES[axes], **settings)


def batch_of(
    numbers: Sequence[int], axes: int = 3, channels: int = 2, dtype: torch.dtype = torch.uint8, more: int = 0
) -> dict[str, Any]:
    """Images that are `more` voxels larger than the patch, on all sides."""
    generator, shape = torch.Generator().manual_seed(0), [n + 2 * more for n in SHAPES[axes]]
    label = torch.randint(0, 4, (len(numbers), 1, *shape), generator=generator).to(dtype)
    image = torch.randn(len(numbers), channels, *shape, generator=generator)
    return {"image": image, "label": label, "sample": torch.tensor(numbers)}


def fixed(axes: int, count: int = 1, channels: int = 1, **changes: Any) -> Parameters:
    """Parameters that do nothing, but for the changes."""
    ones, none = torch.ones(count, channels), torch.zeros(count, channels)
    values: dict[str, Any] = {
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


def positions_mm(shape: Sequence[int], spacing_mm: Sequence[float]) -> np.ndarray:
    """(axes, *shape): each voxel's place from the centre."""
    axes = [(np.arange(n) + 0.5 - n / 2) * s for n, s in zip(shape, spacing_mm, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij"))


def gaussian(
    shape: Sequence[int], spacing_mm: Sequence[float], centre_mm: Sequence[float], sigma_mm: float
) -> Tensor:
    away = positions_mm(shape, spacing_mm) - np.reshape(centre_mm, (-1, *(1,) * len(shape)))
    return torch.from_numpy(np.exp(-0.5 * (away**2).sum(0) / sigma_mm**2)).float()[None, None]


def in_voxels(matrix_mm: np.ndarray, spacing_mm: Sequence[float]) -> Tensor:
    return torch.tensor(matrix_mm * np.array(spacing_mm) / np.array(spacing_mm)[:, None]).float()[None]


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("settings", [ALL, SOME])
@pytest.mark.parametrize("more", [0, 4])
def test_a_batch_is_its_samples(axes: int, settings: dict[str, Any], more: int) -> None:
    augment, batch = make(axes, 3, **settings), batch_of([4, 9, 2, 11, 5], axes, more=more)
    together = augment(batch)
    for i in range(5):
        alone = augment({key: value[i : i + 1] for key, value in batch.items()})
        torch.testing.assert_close(together["image"][i : i + 1], alone["image"], rtol=0, atol=1e-6)
        assert torch.equal(together["label"][i : i + 1], alone["label"])
    assert together["image"].shape == (5, 2, *SHAPES[axes]) and together["label"].shape == (
        5,
        1,
        *SHAPES[axes],
    )


@pytest.mark.parametrize("axes", [2, 3])
def test_a_stack_on_an_accelerator_is_the_samples_in_a_worker(
    axes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its way, few calls for all samples at once, taken on a CPU."""
    settings = {
        **SOME,
        "flip_label_pairs": [(1, 2)],
        "left_right_axis": 0,
        "elastic_mm": 2,
        "elastic_spacing_mm": 8,
    }
    augment, batch = make(axes, 3, **settings), batch_of(range(16), axes, more=3)
    one_by_one = augment(batch)
    monkeypatch.setattr(spatial, "one_by_one", lambda device: False)
    stack = augment(batch)
    torch.testing.assert_close(stack["image"], one_by_one["image"], rtol=1e-4, atol=1e-4)
    assert (stack["label"] != one_by_one["label"]).float().mean() < 1e-3  # ties of the nearest voxel


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gpu_gives_what_a_worker_gives(axes: int, dtype: torch.dtype) -> None:
    """But for the noise, as its generator draws other numbers."""
    settings = {**SOME, "p": {**SOME["p"], "noise": 0}, "elastic_mm": 2, "elastic_spacing_mm": 8}
    augment, batch = make(axes, 3, **settings), batch_of(range(16), axes, more=3)
    there = augment({k: v.to(dtype).cuda() if k == "image" else v.cuda() for k, v in batch.items()})
    here = augment(batch)
    torch.testing.assert_close(there["image"].float().cpu(), here["image"], rtol=0, atol=2e-2)
    assert (there["label"].cpu() != here["label"]).float().mean() < 1e-3
    assert there["image"].is_cuda and there["image"].dtype == dtype


@pytest.mark.parametrize("axes", [2, 3])
def test_samples_read_no_larger_than_they_need_give_the_same(axes: int) -> None:
    """Loader workers read what a sample shows; an accelerator gets the largest size for all."""
    settings = {
        **SOME,
        "p": {**SOME["p"], **dict.fromkeys(PLACE, 0.3)},
        "elastic_mm": 2,
        "elastic_spacing_mm": 8,
    }
    augment = make(axes, 1, **settings)
    numbers = list(range(20))
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(20, 1, *augment.max_read_size, generator=generator)
    label = torch.randint(0, 4, (20, 1, *augment.max_read_size), generator=generator)
    whole = augment({"image": image, "label": label, "sample": numbers})
    sizes = [augment.read_size(n) for n in numbers]
    assert len(set(sizes)) > 4 and SHAPES[axes] in sizes
    assert all(n <= most for size in sizes for n, most in zip(size, augment.max_read_size, strict=True))
    parts = [[centre(x[i], sizes[i]).clone() for i in numbers] for x in (image, label)]
    small = augment({"image": parts[0], "label": parts[1], "sample": numbers})
    torch.testing.assert_close(small["image"], whole["image"], rtol=0, atol=1e-4)
    assert (small["label"] != whole["label"]).float().mean() < 1e-3  # ties of the nearest voxel


@pytest.mark.parametrize("axes", [2, 3])
def test_nothing_from_beyond_the_patch_is_missing(axes: int) -> None:
    """An image of ones stays one wherever `read_size` is not cut at its largest."""
    augment = make(axes, 0, p={"rotation": 1, "scale": 1, "shift": 1}, rotation_deg=25, scale=(0.8, 1.1))
    for number in range(20):
        size = augment.read_size(number)
        ones = torch.ones(1, 1, *size)
        image, _ = augment.place(ones, ones.to(torch.uint8), augment.sample([number]))
        inside = all(n < most for n, most in zip(size, augment.max_read_size, strict=True))
        assert not inside or image.min() > 0.999
        cut = centre(ones, [max(1, n - 6) for n in size])
        assert (
            augment.place(cut, cut.to(torch.uint8), augment.sample([number]))[0].min() < 0.5
        )  # and is not larger than needed


def test_the_largest_size_is_that_of_a_patch_turned_in_millimetres() -> None:
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
    assert make(2, p={"rotation": 1}, **{**settings, "rotation_deg": 90}).max_read_size == (
        32,
        18,
    )  # the diagonal
    assert make(2, p={"rotation": 1}, **{**settings, "spacing_mm": (1, 4)}).max_read_size == (22, 12)


@pytest.mark.parametrize("axes", [2, 3])
def test_probabilities_of_zero_change_nothing(axes: int) -> None:
    batch = batch_of([0, 1], axes)
    out = make(axes)(batch)
    assert torch.equal(out["image"], batch["image"]) and torch.equal(out["label"], batch["label"])
    assert out["sample"] is batch["sample"]


@pytest.mark.parametrize("axes", [2, 3])
def test_parameters_that_do_nothing_change_nothing(axes: int) -> None:
    """The resampling itself: voxel centres come back as they were."""
    batch = batch_of([0, 1], axes)
    still = fixed(axes, 2, 2, moved=torch.tensor([True, True]))
    image, label = make(axes, **ALL).apply(batch["image"], batch["label"], still)
    torch.testing.assert_close(image, batch["image"], rtol=0, atol=1e-5)
    assert torch.equal(label, batch["label"])


def test_the_input_is_left_alone() -> None:
    batch = batch_of([0, 1, 2, 3])
    image, label = batch["image"].clone(), batch["label"].clone()
    for settings in (ALL, SOME, {"p": dict.fromkeys(VALUES, 1.0)}):
        make(**settings)(batch)
    assert torch.equal(batch["image"], image) and torch.equal(batch["label"], label)


def test_seed_and_sample_decide_everything() -> None:
    batch = batch_of([7, 8])
    batch["image"][1], batch["label"][1] = batch["image"][0], batch["label"][0]
    first, again = make(seed=5, **ALL)(batch), make(seed=5, **ALL)(batch)
    assert torch.equal(first["image"], again["image"]) and torch.equal(first["label"], again["label"])
    assert not torch.equal(first["image"][0], first["image"][1])
    assert not torch.equal(first["label"][0], first["label"][1])
    assert not torch.equal(first["image"], make(seed=6, **ALL)(batch)["image"])
    swapped = make(seed=5, **ALL)({**batch, "sample": torch.tensor([8, 7])})
    torch.testing.assert_close(swapped["image"].flip(0), first["image"], rtol=0, atol=1e-6)


def test_what_was_done_to_an_image_can_be_done_to_a_prediction() -> None:
    augment, batch = make(**ALL), batch_of([3])
    parameters = augment.sample([3], 2)
    prediction = batch["label"].float() * 10
    _, moved = augment.apply(batch["image"], batch["label"], parameters)
    seen, label = augment.place(prediction, batch["label"], parameters)
    assert torch.equal(label, moved)
    assert dice(seen.numpy() > 15, moved.numpy() > 1) > 0.7  # random voxels, one linear, one nearest


@pytest.mark.parametrize("spacing", [(1.0, 1.0), (0.8, 2.0), (1.0, 1.0, 1.0), (0.7, 1.0, 1.9)])
def test_a_blob_lands_where_the_matrix_says_in_mm(spacing: tuple[float, ...]) -> None:
    """Output position p shows the input at matrix @ p + shift: what was at q is found at inverse(matrix) @
    (q - shift).
    """
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
        found = (places * mass).reshape(axes, -1).sum(1) / mass.sum()
        np.testing.assert_allclose(found, after, atol=tolerance)


def test_drawn_rotations_keep_a_ball_a_ball() -> None:
    """With voxels of 1 x 1.2 x 2.5 mm; a rotation in voxels would turn it into an egg."""
    shape, spacing = (40, 44, 13), (1, 1.2, 2.5)
    ball = torch.from_numpy((positions_mm(shape, spacing) ** 2).sum(0) < 14**2)[None, None].to(torch.uint8)
    augment = make(spacing_mm=spacing, patch_size=shape, p={"rotation": 1}, rotation_deg=45)
    for number in range(4):
        image, label = augment.apply(ball.float(), ball, augment.sample([number]))
        overlaps = dice(label.numpy() > 0, ball.numpy() > 0), dice(image.numpy() > 0.5, ball.numpy() > 0)
        assert min(overlaps) > 0.94


@pytest.mark.parametrize("axis", range(3))
def test_a_shift_moves_by_what_it_says(axis: int) -> None:
    """Two voxels of 14, 12 or 10, towards the start: the share is of the patch along that axis."""
    batch = batch_of([0], channels=1)
    size = SHAPES[3][axis]
    shift = torch.zeros(1, 3)
    shift[0, axis] = 2 / size
    image, label = make().apply(batch["image"], batch["label"], fixed(3, shift=shift))
    for out, source in ((image, batch["image"]), (label, batch["label"])):
        moved = source.narrow(2 + axis, 2, size - 2)
        torch.testing.assert_close(out.narrow(2 + axis, 0, size - 2), moved, rtol=0, atol=1e-4)
        assert out.narrow(2 + axis, size - 2, 2).abs().max() < 1e-5  # 0 comes in from outside


def test_a_shift_across_thick_slices_is_by_whole_slices() -> None:
    image = torch.zeros(20, 1, 16, 16, 8)
    image[..., 4:] = 1
    augment = make(spacing_mm=(1, 1, 5), patch_size=(16, 16, 8), p={"shift": 1}, shift=0.2)
    drawn = augment.sample(range(20)).shift
    assert drawn[:, 2].mul(8).unique().tolist() == [-2, -1, 0, 1, 2]
    seen = augment.place(image, image.to(torch.uint8), augment.sample(range(20)))[0][:, :, 4:12, 4:12]
    assert ((seen - seen.round()).abs() < 1e-4).all()


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_labels_keep_their_values_and_type(axes: int, dtype: torch.dtype) -> None:
    batch = batch_of(range(8), axes, dtype=dtype)
    batch["label"][batch["label"] == 3] = 200 if dtype == torch.uint8 else 32767
    out = make(axes, **ALL)(batch)
    assert out["label"].dtype == dtype and out["label"].shape == batch["label"].shape
    assert set(out["label"].unique().tolist()) <= set(batch["label"].unique().tolist())
    assert not torch.equal(out["label"], batch["label"])
    assert out["image"].dtype == torch.float32 and out["image"].shape == batch["image"].shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_half_precision_out(dtype: torch.dtype) -> None:
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
def test_image_and_label_move_together(axes: int) -> None:
    label = torch.zeros(6, 1, *(32,) * axes, dtype=torch.uint8)
    label[(..., slice(8, 26), slice(5, 20))] = 1
    batch = {"image": label.float(), "label": label, "sample": torch.arange(6)}
    settings = {**MOVES, "elastic_mm": 3, "elastic_spacing_mm": 12, "mirror_axes": "all"}
    out = make(axes, 1, (32,) * axes, **settings)(batch)
    for i in range(6):
        assert dice(out["image"][i].numpy() > 0.5, out["label"][i].numpy() > 0) > 0.97
        assert dice(label[i].numpy() > 0, out["label"][i].numpy() > 0) < 0.95


def test_elastic_deformation_moves_smoothly_and_not_beyond_its_largest() -> None:
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
        moved = augment.place(image, label, augment.sample([number], 3))[0][0].numpy() - still
        largest.append(np.abs(moved).max())
        slope = np.stack([np.gradient(moved[i], *spacing) for i in range(3)])
        assert np.linalg.det(np.moveaxis(slope, (0, 1), (-2, -1)) + np.eye(3)).min() > 0  # nothing folds over
    assert 2 < max(largest) <= 4.001 and min(largest) < 1


@pytest.mark.parametrize(
    ("spacing", "turns"), [((0.5, 0.5, 1.7), False), ((3.1, 1, 1), False), ((2, 2, 6), True)]
)
def test_across_thick_slices_nothing_is_resampled(spacing: tuple[float, ...], turns: bool) -> None:
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


def test_drawn_parameters_stay_in_their_ranges_and_use_them() -> None:
    drawn = make(2, spacing_mm=(1, 1), **{**ALL, "p": {**ALL["p"], "elastic": 0}}).sample(range(500), 2)
    scale = torch.linalg.det(drawn.matrix).sqrt()
    assert 0.8 <= scale.min() < 0.82 and 1.22 < scale.max() <= 1.25
    angle = torch.rad2deg(torch.atan2(drawn.matrix[:, 1, 0], drawn.matrix[:, 0, 0]))
    assert -20 <= angle.min() < -19 and 19 < angle.max() <= 20
    product = drawn.matrix @ drawn.matrix.mT / scale[:, None, None] ** 2
    torch.testing.assert_close(product, torch.eye(2).expand_as(product), rtol=0, atol=1e-5)
    assert (
        drawn.shift.shape == (500, 2)
        and 0.095 < drawn.shift.max() <= 0.1
        and -0.1 <= drawn.shift.min() < -0.095
    )
    ranges = {
        "brightness": (0.75, 1.25),
        "contrast": (0.75, 1.25),
        "gamma": (0.7, 1.5),
        "gamma_inverted": (0.7, 1.5),
    }
    ranges |= {
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
    assert torch.equal(
        drawn.simulate_low_resolution[..., 0], drawn.simulate_low_resolution[..., 1]
    )  # axes alike, other than in blur
    assert not torch.equal(drawn.blur[..., 0], drawn.blur[..., 1])
    assert len(drawn.noise_seed.unique()) == 500


@pytest.mark.parametrize("name", (*PLACE, *VALUES))
def test_probabilities_are_what_they_say_and_change_nothing_else(name: str) -> None:
    """Of 600 samples; what the others draw is the same as with all of them certain."""
    settings = {**ALL, "elastic_spacing_mm": 30}
    sure = make(2, **settings).sample(range(600))
    drawn = make(2, **{**settings, "p": {**ALL["p"], name: 0.25}}).sample(range(600))
    if name in PLACE:
        left = {"rotation": lambda d: d.matrix[:, 0, 1] != 0, "shift": lambda d: d.shift.any(1)}
        left |= {
            "scale": lambda d: (torch.linalg.det(d.matrix) - 1).abs() > 1e-6,
            "elastic": lambda d: d.elastic.flatten(1).any(1),
        }
        share = left[name](drawn).float().mean()
    else:
        field = {"noise": "noise_std"}.get(name, name)
        neutral = 0 if name in ("noise", "blur", "additive_brightness") else 1
        share = (getattr(drawn, field).reshape(600, -1)[:, 0] != neutral).float().mean()
    assert share == pytest.approx(0.25, abs=0.05)
    mine = {"rotation": {"matrix"}, "scale": {"matrix"}, "noise": {"noise_std"}}.get(name, {name})
    for other in set(vars(drawn)) - mine:
        assert torch.equal(getattr(drawn, other), getattr(sure, other)), other


def test_only_what_moves_is_resampled() -> None:
    assert not make(p={"noise": 1}).sample(range(9)).moved.any()
    for name in PLACE:
        assert make(p={name: 1}).sample(range(9)).moved.all()
    assert make(p={"noise": 1}).max_read_size == SHAPES[3] and make(p={"noise": 1}).read_size(0) == SHAPES[3]


@pytest.mark.parametrize("axes", [2, 3])
def test_mirrored_samples_are_exact_flips_of_image_and_label(axes: int) -> None:
    augment, batch = make(axes, mirror_axes=[0, axes - 1]), batch_of(range(24), axes, more=2)
    out, seen = augment(batch), set()
    image, label = centre(batch["image"], SHAPES[axes]), centre(batch["label"], SHAPES[axes])
    for i in range(24):
        flips = [[], [1], [axes], [1, axes]]
        found = [n for n, dims in enumerate(flips) if torch.equal(out["image"][i], image[i].flip(dims))]
        assert len(found) == 1 and torch.equal(out["label"][i], label[i].flip(flips[found[0]]))
        seen.update(found)
    assert seen == {0, 1, 2, 3}


def test_mirroring_changes_nothing_else_of_a_sample() -> None:
    plain, mirrored = (
        make(seed=5, **ALL).sample([3, 4, 5, 6]),
        make(seed=5, **ALL, mirror_axes=[0]).sample([3, 4, 5, 6]),
    )
    assert torch.equal(plain.matrix.abs(), mirrored.matrix.abs()) and not torch.equal(
        plain.matrix, mirrored.matrix
    )
    for name in set(vars(plain)) - {"matrix", "flips"}:
        assert torch.equal(getattr(plain, name), getattr(mirrored, name))


@pytest.mark.parametrize("moves", [False, True])
def test_left_and_right_labels_swap_with_the_mirror(moves: bool) -> None:
    label = torch.randint(0, 5, (16, 1, *SHAPES[3]), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    batch = {"image": torch.zeros(16, 1, *SHAPES[3]), "label": label, "sample": torch.arange(16)}
    settings = {"mirror_axes": [0, 1], **(MOVES if moves else {})}
    plain, paired = make(**settings), make(**settings, flip_label_pairs=[(1, 3), (2, 4)], left_right_axis=0)
    flips = plain.sample(range(16)).flips
    assert {tuple(f) for f in flips[:, :2].tolist()} == {(a, b) for a in (False, True) for b in (False, True)}
    before, after = plain(batch)["label"], paired(batch)["label"]
    table = torch.tensor([0, 3, 4, 1, 2], dtype=torch.uint8)
    for i in range(16):
        assert torch.equal(after[i], table[before[i].long()] if flips[i, 0] else before[i])


def test_the_presets_are_valid_and_cost_what_they_say() -> None:
    for path in CONF.glob("*.yaml"):
        settings = yaml.safe_load(path.read_text())
        assert settings.pop("_target_") == "medconv.data.augmentation.augment.Augment"
        for axes in (2, 3):
            out = make(axes, **settings)(batch_of(range(12), axes))
            changed = sum(
                not torch.equal(a, b)
                for a, b in zip(out["image"], batch_of(range(12), axes)["image"], strict=True)
            )
            assert changed == {"none": 0, "light": 12}.get(path.stem, changed) and (
                changed > 6 or path.stem == "none"
            )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"p": {"rotate": 1}},
            r"augmentation\.p gives probabilities from 0 to 1 of rotation, scale, .*, got \['rotate'\]",
        ),
        ({"p": {"noise": 1.5}}, r"augmentation\.p gives probabilities from 0 to 1 .* 'noise': 1\.5"),
        ({"p": {"noise": float("nan")}}, r"augmentation\.p gives probabilities"),
        (
            {"scale": (0, 1)},
            r"augmentation\.scale must be a range \[low, high\] from 0\.01 upwards, got \[0, 1\]",
        ),
        ({"scale": (1.4, 0.7)}, r"augmentation\.scale must be a range"),
        ({"gamma": (0.7,)}, r"augmentation\.gamma must be a range .* got \[0\.7\]"),
        ({"scale": 2}, r"augmentation\.scale must be a range .* got \[2\]"),
        ({"noise_std": (-0.1, 1)}, r"augmentation\.noise_std must be a range .* from 0 upwards"),
        ({"blur_sigma": (0.5, float("inf"))}, r"augmentation\.blur_sigma must be a range"),
        (
            {"simulate_low_resolution": (0.5, 2)},
            r"augmentation\.simulate_low_resolution is a share of the voxels, at most 1, got \[0\.5, 2\]",
        ),
        ({"rotation_deg": -1}, r"augmentation\.rotation_deg must be 0 or more, got -1"),
        ({"shift": float("nan")}, r"augmentation\.shift must be 0 or more, got nan"),
        (
            {"p": {"elastic": 1}, "elastic_mm": 11},
            r"augmentation\.elastic_mm must be at most 0\.4 of .* got 11 and 25",
        ),
        (
            {"mirror_axes": [3]},
            r"augmentation\.mirror_axes must be different spatial axes from 0 to 2, or `all`, got \[3\]",
        ),
        ({"mirror_axes": [0, 0]}, r"augmentation\.mirror_axes must be different"),
        ({"mirror_axes": ["a"]}, r"augmentation\.mirror_axes must be different .* got \['a'\]"),
        ({"mirror_axes": 0}, r"augmentation\.mirror_axes must be different .* got 0"),
        ({"rotation_deg": "abc"}, r"augmentation\.rotation_deg must be 0 or more, got abc"),
        ({"scale": ("a", "b")}, r"augmentation\.scale must be a range"),
        ({"mirror_axes": "both"}, r"augmentation\.mirror_axes must be different .* got both"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)
