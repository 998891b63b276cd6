"""medconv/data/augment.py: where things move, in millimetres, and that a batch is nothing but its samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from makers import dice, rotation
from torch import Tensor

from medconv.data.augment import Augment, Parameters

ALL: dict[str, Any] = {
    "rotation_deg": 20,
    "scale": 0.2,
    "shift": 0.1,
    "contrast": 0.25,
    "brightness": 0.2,
    "noise_std": 0.15,
}
SHAPES = {2: (20, 17), 3: (14, 12, 10)}


def batch_of(numbers: Sequence[int], axes: int = 3, channels: int = 2, dtype: torch.dtype = torch.uint8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shape = (len(numbers), channels, *SHAPES[axes])
    label = torch.randint(0, 4, (len(numbers), 1, *SHAPES[axes]), generator=generator).to(dtype)
    return {"image": torch.randn(shape, generator=generator), "label": label, "sample": torch.tensor(numbers)}


def fixed(axes: int, count: int = 1, **changes: Any) -> Parameters:
    """Parameters that do nothing, but for the changes."""
    values: dict[str, Any] = {
        "matrix": torch.eye(axes).repeat(count, 1, 1),
        "shift": torch.zeros(count, axes),
        "gain": torch.ones(count),
        "offset": torch.zeros(count),
        "noise_std": torch.zeros(count),
        "noise_seed": torch.arange(count),
    }
    return Parameters(**{**values, **changes})


def positions_mm(shape: Sequence[int], spacing_mm: Sequence[float]) -> np.ndarray:
    """(axes, *shape): each voxel's place from the centre."""
    axes = [(np.arange(n) + 0.5 - n / 2) * s for n, s in zip(shape, spacing_mm, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij"))


def gaussian(shape: Sequence[int], spacing_mm: Sequence[float], centre_mm: Sequence[float], sigma_mm: float) -> Tensor:
    away = positions_mm(shape, spacing_mm) - np.reshape(centre_mm, (-1, *(1,) * len(shape)))
    return torch.from_numpy(np.exp(-0.5 * (away**2).sum(0) / sigma_mm**2)).float()[None, None]


@pytest.mark.parametrize("axes", [2, 3])
def test_a_batch_is_its_samples(axes: int) -> None:
    augment, batch = Augment(3, (1, 1.5, 2)[:axes], **ALL), batch_of([4, 9, 2], axes)
    together = augment(batch)
    for i in range(3):
        alone = augment({key: value[i : i + 1] for key, value in batch.items()})
        torch.testing.assert_close(together["image"][i : i + 1], alone["image"], rtol=0, atol=1e-6)
        assert torch.equal(together["label"][i : i + 1], alone["label"])


@pytest.mark.parametrize("axes", [2, 3])
def test_ranges_of_zero_change_nothing(axes: int) -> None:
    batch = batch_of([0, 1], axes)
    out = Augment(0, (1, 1.5, 2)[:axes])(batch)
    assert torch.equal(out["image"], batch["image"]) and torch.equal(out["label"], batch["label"])
    assert out["sample"] is batch["sample"]


@pytest.mark.parametrize("axes", [2, 3])
def test_parameters_that_do_nothing_change_nothing(axes: int) -> None:
    """The resampling itself: voxel centres come back as they were."""
    batch = batch_of([0, 1], axes)
    image, label = Augment(0, (1, 1.5, 4)[:axes], **ALL).apply(batch["image"], batch["label"], fixed(axes, 2))
    torch.testing.assert_close(image, batch["image"], rtol=0, atol=1e-5)
    assert torch.equal(label, batch["label"])


def test_the_input_is_left_alone() -> None:
    batch = batch_of([0, 1])
    image, label = batch["image"].clone(), batch["label"].clone()
    Augment(0, (1, 1, 1), **ALL)(batch)
    assert torch.equal(batch["image"], image) and torch.equal(batch["label"], label)


def test_seed_and_sample_decide_everything() -> None:
    batch = batch_of([7, 8])
    batch["image"][1], batch["label"][1] = batch["image"][0], batch["label"][0]
    first, again = Augment(5, (1, 1, 1), **ALL)(batch), Augment(5, (1, 1, 1), **ALL)(batch)
    assert torch.equal(first["image"], again["image"]) and torch.equal(first["label"], again["label"])
    assert not torch.equal(first["image"][0], first["image"][1])
    assert not torch.equal(first["label"][0], first["label"][1])
    assert not torch.equal(first["image"], Augment(6, (1, 1, 1), **ALL)(batch)["image"])
    swapped = Augment(5, (1, 1, 1), **ALL)({**batch, "sample": torch.tensor([8, 7])})
    torch.testing.assert_close(swapped["image"].flip(0), first["image"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("spacing", [(1.0, 1.0), (0.8, 2.0), (1.0, 1.0, 1.0), (0.7, 1.0, 1.9)])
def test_a_blob_lands_where_the_matrix_says_in_mm(spacing: tuple[float, ...]) -> None:
    """Output position p shows the input at matrix @ p + shift: what was at q is found at inverse(matrix) @ (q - shift)."""
    axes = len(spacing)
    shape = tuple(round(extent / s) for extent, s in zip((60, 44, 50), spacing, strict=False))
    matrix = rotation((25, -15, 10))[:axes, :axes] if axes == 3 else rotation((30, 0, 0))[:2, :2]
    matrix = 1.1 * matrix
    share, before = np.array([0.05, -0.1, 0.08])[:axes], np.array([6.0, -5.0, 4.0])[:axes]
    after = np.linalg.inv(matrix) @ (before - share * np.array(shape) * spacing)
    parameters = fixed(axes, matrix=torch.tensor(matrix).float()[None], shift=torch.tensor(share).float()[None])
    image = gaussian(shape, spacing, before, 3.0)
    out, label = Augment(0, spacing, **ALL).apply(image, (image > 0.5).to(torch.uint8), parameters)
    places = positions_mm(shape, spacing)
    for mass, tolerance in ((out[0, 0].numpy(), 0.05), (label[0, 0].numpy(), 0.4)):
        found = (places * mass).reshape(axes, -1).sum(1) / mass.sum()
        np.testing.assert_allclose(found, after, atol=tolerance)


@pytest.mark.parametrize("angles", [(40, 0, 0), (0, 40, 0), (0, 0, 40), (25, -35, 15)])
def test_rotation_keeps_a_ball_a_ball(angles: tuple[float, float, float]) -> None:
    """With voxels of 1 x 1.2 x 2.5 mm; a rotation in voxels would turn it into an egg."""
    shape, spacing = (40, 44, 13), (1, 1.2, 2.5)
    ball = torch.from_numpy((positions_mm(shape, spacing) ** 2).sum(0) < 14**2)[None, None].to(torch.uint8)
    parameters = fixed(3, matrix=torch.tensor(rotation(angles)).float()[None])
    image, label = Augment(0, spacing, rotation_deg=45).apply(ball.float(), ball, parameters)
    overlaps = dice(label.numpy() > 0, ball.numpy() > 0), dice(image.numpy() > 0.5, ball.numpy() > 0)
    assert min(overlaps) > 0.94


@pytest.mark.parametrize("axis", range(3))
def test_a_shift_moves_by_what_it_says(axis: int) -> None:
    """Two voxels of 14, 12 or 10, towards the start: the share is of the patch along that axis."""
    batch = batch_of([0])
    size = SHAPES[3][axis]
    shift = torch.zeros(1, 3)
    shift[0, axis] = 2 / size
    image, label = Augment(0, (1, 1.5, 4), shift=0.5).apply(batch["image"], batch["label"], fixed(3, shift=shift))
    for out, source in ((image, batch["image"]), (label, batch["label"])):
        moved = source.narrow(2 + axis, 2, size - 2)
        torch.testing.assert_close(out.narrow(2 + axis, 0, size - 2), moved, rtol=0, atol=1e-4)
        assert not out.narrow(2 + axis, size - 2, 2).any()  # 0 comes in from outside


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_labels_keep_their_values_and_type(axes: int, dtype: torch.dtype) -> None:
    batch = batch_of(range(8), axes, dtype=dtype)
    batch["label"][batch["label"] == 3] = 200 if dtype == torch.uint8 else 32767
    out = Augment(0, (1,) * axes, **ALL)(batch)
    assert out["label"].dtype == dtype and out["label"].shape == batch["label"].shape
    assert set(out["label"].unique().tolist()) <= set(batch["label"].unique().tolist())
    assert not torch.equal(out["label"], batch["label"])
    assert out["image"].dtype == torch.float32 and out["image"].shape == batch["image"].shape


@pytest.mark.parametrize("axes", [2, 3])
def test_image_and_label_move_together(axes: int) -> None:
    label = torch.zeros(6, 1, *(32,) * axes, dtype=torch.uint8)
    label[(..., slice(8, 26), slice(5, 20))] = 1
    batch = {"image": label.float(), "label": label, "sample": torch.arange(6)}
    out = Augment(1, (1, 1, 2)[:axes], rotation_deg=30, scale=0.2, shift=0.1)(batch)
    for i in range(6):
        assert dice(out["image"][i].numpy() > 0.5, out["label"][i].numpy() > 0) > 0.97
        assert dice(label[i].numpy() > 0, out["label"][i].numpy() > 0) < 0.95


def test_drawn_parameters_stay_in_their_ranges_and_use_them() -> None:
    drawn = Augment(0, (1, 1), **ALL).sample(range(500))
    scale = torch.linalg.det(drawn.matrix).sqrt()
    assert 0.8 <= scale.min() < 0.82 and 1.22 < scale.max() <= 1.25
    assert scale.log().mean().abs() < 0.02  # in as often as out
    angle = torch.rad2deg(torch.atan2(drawn.matrix[:, 1, 0], drawn.matrix[:, 0, 0]))
    assert -20 <= angle.min() < -19 and 19 < angle.max() <= 20
    product = drawn.matrix @ drawn.matrix.mT / scale[:, None, None] ** 2
    torch.testing.assert_close(product, torch.eye(2).expand_as(product), rtol=0, atol=1e-5)
    assert drawn.shift.shape == (500, 2) and 0.095 < drawn.shift.max() <= 0.1 and -0.1 <= drawn.shift.min() < -0.095
    assert 0.75 <= drawn.gain.min() < 0.77 and 1.23 < drawn.gain.max() <= 1.25
    assert -0.2 <= drawn.offset.min() < -0.19 and 0.19 < drawn.offset.max() <= 0.2
    assert 0 <= drawn.noise_std.min() < 0.01 and 0.14 < drawn.noise_std.max() <= 0.15
    assert len(drawn.noise_seed.unique()) == 500


@pytest.mark.parametrize(("spacing", "turns"), [((1, 1, 3.5), False), ((3.1, 1, 1), False), ((1, 1, 3), True)])
def test_thick_slices_are_not_rotated_into_thin_ones(spacing: tuple[float, ...], turns: bool) -> None:
    thick = int(np.argmax(spacing))
    matrices = Augment(0, spacing, rotation_deg=20).sample(range(20)).matrix
    across = torch.cat([matrices[:, thick, :], matrices[:, :, thick]], dim=1)
    across = across[:, [i for i in range(6) if i % 3 != thick]]
    within = matrices[:, [i for i in range(3) if i != thick]][:, :, [i for i in range(3) if i != thick]]
    assert (across.abs().max() > 0.1) == turns
    assert within[:, 0, 1].abs().max() > 0.1


def test_contrast_and_brightness_by_numbers() -> None:
    batch = batch_of([0, 1])
    parameters = fixed(3, 2, gain=torch.tensor([2.0, 0.5]), offset=torch.tensor([-1.0, 3.0]))
    image, label = Augment(0, (1, 1, 1), contrast=1, brightness=3).apply(batch["image"], batch["label"], parameters)
    torch.testing.assert_close(image[0], batch["image"][0] * 2 - 1)
    torch.testing.assert_close(image[1], batch["image"][1] * 0.5 + 3)
    assert label is batch["label"]


def test_noise_has_the_stated_deviation() -> None:
    image, label = torch.zeros(3, 2, 40, 50), torch.ones(3, 1, 40, 50, dtype=torch.uint8)
    stated = torch.tensor([0.0, 0.3, 0.7])
    noisy, same = Augment(0, (1, 1), noise_std=1).apply(image, label, fixed(2, 3, noise_std=stated))
    assert torch.equal(same, label)
    for sample, std in zip(noisy, stated.tolist(), strict=True):
        assert sample.std().item() == pytest.approx(std, rel=0.05) and sample.mean().abs() < 0.02
    first, second = noisy[2].flatten(1)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.1
    assert abs(torch.corrcoef(torch.stack([noisy[1].flatten(), noisy[2].flatten()]))[0, 1]) < 0.1


@pytest.mark.parametrize("key", ALL)
@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_bad_ranges(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"augment: every range must be 0 or more, .* got .*'{key}': {value}"):
        Augment(0, (1, 1, 1), **{key: value})


@pytest.mark.parametrize("value", [1.0, 1.5])
def test_bad_scale(value: float) -> None:
    with pytest.raises(ValueError, match=rf"scale below 1, got .*{value}"):
        Augment(0, (1, 1, 1), scale=value)


@pytest.mark.parametrize("axes", [2, 3])
def test_mirrored_samples_are_exact_flips_of_image_and_label(axes: int) -> None:
    augment, batch = Augment(0, (1, 1.5, 2)[:axes], mirror_axes=[0, axes - 1]), batch_of(range(24), axes)
    out, seen = augment(batch), set()
    for i in range(24):
        flips = [[], [1], [axes], [1, axes]]
        found = [
            n for n, dims in enumerate(flips) if torch.allclose(out["image"][i], batch["image"][i].flip(dims), atol=1e-5)
        ]
        assert len(found) == 1 and torch.equal(out["label"][i], batch["label"][i].flip(flips[found[0]]))
        seen.update(found)
    assert seen == {0, 1, 2, 3}


def test_mirroring_changes_nothing_else_of_a_sample() -> None:
    plain, mirrored = Augment(5, (1, 1, 1), **ALL), Augment(5, (1, 1, 1), **ALL, mirror_axes=[0])
    a, b = plain.sample([3, 4, 5, 6]), mirrored.sample([3, 4, 5, 6])
    assert torch.equal(a.matrix.abs(), b.matrix.abs()) and not torch.equal(a.matrix, b.matrix)
    assert torch.equal(a.shift, b.shift) and torch.equal(a.gain, b.gain) and torch.equal(a.noise_seed, b.noise_seed)


@pytest.mark.parametrize("axes", [[3], [0, 0], [-1]])
def test_bad_mirror_axes(axes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"augment\.mirror_axes must be different spatial axes from 0 to 2"):
        Augment(0, (1, 1, 1), mirror_axes=axes)
