"""What changes images and labels in augmentation is one graph for the compiler, with the values of eager.

Chosen and drawn outside: rows, parameters, and noise, of which each sample has a generator of its own.
"""

import pytest
import torch
from helpers.augmentation import SHAPES

from medconv.data.augmentation import intensity, spatial
from medconv.data.augmentation.augment import swapped_values

FACTORS = torch.tensor([0.7, 0.9, 1.4, 1.2])
VALUES = {
    "brightness": lambda rows, factors: intensity.scale_(rows, factors, -factors),
    "contrast": intensity.stretch_,
    "gamma": lambda rows, factors: intensity.bend_(rows, factors, False),
    "gamma_inverted": lambda rows, factors: intensity.bend_(rows, factors, True),
}


def _compiled(function):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)


def _rows(dims, count):
    return torch.randn(count, *SHAPES[dims], generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(
    ("name", "dims"), [("brightness", 3), ("contrast", 3), ("gamma", 2), ("gamma_inverted", 3)]
)
def test_values(name, dims):
    """Any number of rows above one is the same graph."""
    compiled = _compiled(VALUES[name])
    for count in (4, 3, 2):
        found, expected = _rows(dims, count), _rows(dims, count)
        with torch.compiler.set_stance("default" if count == 4 else "fail_on_recompile"):
            compiled(found, FACTORS[:count].clone())
        VALUES[name](expected, FACTORS[:count])
        assert not torch.equal(found, _rows(dims, count))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("dims", "axis"), [(3, 0), (3, 1), (2, 1)])
def test_blur_and_low_resolution(dims, axis):
    matrix = intensity._softening(SHAPES[dims][axis], FACTORS, FACTORS.clamp(max=1))
    found, expected = _rows(dims, 4), _rows(dims, 4)
    _compiled(intensity.multiply_)(found, matrix, axis)
    intensity.multiply_(expected, matrix, axis)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("dims", "bends", "labelled"), [(3, True, True), (2, False, False)])
def test_moves(dims, bends, labelled):
    size, distance = SHAPES[dims], (8.0,) * dims
    image, half = torch.randn(2, 1, *size), torch.tensor(size) / 2
    label = torch.randint(0, 4, (2, 1, *size)).to(torch.uint8) if labelled else None
    theta = torch.eye(dims, dims + 1) + 0.2 * torch.randn(2, dims, dims + 1)
    control = torch.randn(2, dims, *spatial.control_points(size, distance))
    bases = [spatial._spline_basis(n, far) for n, far in zip(size, distance, strict=True)]

    def move(image, label, theta):
        field = spatial.bend(control, bases) if bends else None
        return spatial.sample(image, label, theta, half, field, size)

    found, expected = _compiled(move)(image, label, theta), move(image, label, theta)
    torch.testing.assert_close(found[0], expected[0])
    assert labelled == (found[1] is not None)
    if found[1] is not None and expected[1] is not None:
        assert (found[1] != expected[1]).float().mean() < 1e-2  # ties of the nearest voxel


@pytest.mark.parametrize("dims", [2, 3])
def test_labels_of_mirrored_samples(dims):
    label = torch.randint(0, 4, (2, 1, *SHAPES[dims]))
    assert torch.equal(_compiled(swapped_values)(label, [[1, 2]]), swapped_values(label, [[1, 2]]))
