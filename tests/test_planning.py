"""medconv/planning.py: spacing, patch, strides, kernels and channels of datasets whose plan is known."""

import itertools
from typing import Any

import numpy as np
import pytest

from medconv.data.check import Fingerprint
from medconv.planning import Plan, plan, target_spacing

THIN, THICK = 0.62, 3.6


def fingerprint(shapes: list[tuple[int, ...]], spacings_mm: list[tuple[float, ...]]) -> Fingerprint:
    dims = len(shapes[0])
    return Fingerprint(dims, tuple(shapes), tuple(spacings_mm), ({},), ((1, 1),) * len(shapes))


def one(shape: tuple[int, ...], spacing_mm: tuple[float, ...]) -> Fingerprint:
    return fingerprint([shape], [spacing_mm])


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_hippocampus(order: tuple[int, ...]) -> None:
    """Median 36 x 50 x 35 at 1 mm: three steps, each halving every axis, and a patch that holds the whole image."""
    shape, patch = (36, 50, 35), (40, 56, 40)
    found = plan(one(tuple(shape[i] for i in order), (1, 1, 1)))
    assert found == Plan((1.0,) * 3, tuple(patch[i] for i in order), ((2,) * 3,) * 3, ((3,) * 3,) * 4, (32, 64, 128, 256))


@pytest.mark.parametrize("thick", range(3))
def test_prostate(thick: int) -> None:
    """20 slices of 3.6 mm, 320 x 320 voxels of 0.62 mm: two steps in the plane alone, until voxels are about cubes."""

    def at(across: Any, within: Any) -> tuple[Any, ...]:
        return tuple(across if axis == thick else within for axis in range(3))

    found = plan(one(at(20, 320), at(THICK, THIN)))
    assert found.spacing_mm == at(THICK, THIN)
    assert found.strides == (at(1, 2), at(1, 2), at(2, 2), at(2, 2), at(1, 2))
    assert found.kernel_sizes == (at(1, 3), at(1, 3), at(3, 3), at(3, 3), at(3, 3), at(3, 3))
    assert found.channels == (32, 64, 128, 256, 320, 320)
    assert found.patch_size[thick] == 20
    assert all(size % 32 == 0 and 192 <= size <= 256 for axis, size in enumerate(found.patch_size) if axis != thick)


def test_target_spacing_is_the_median() -> None:
    found = target_spacing(fingerprint([(9, 9, 9)] * 3, [(1, 1, 1), (1.2, 2, 1.5), (5, 3, 1.5)]))
    assert found == (1.2, 2.0, 1.5)


def test_thick_axis_takes_the_tenth_percentile() -> None:
    """Thick means more than 3 times the finest; exactly 3 times is not."""
    thick = [float(mm) for mm in range(4, 15)]  # median 9, 10th percentile 5
    spacings = [(1.0, 3.0, mm) for mm in thick]
    assert target_spacing(fingerprint([(9, 9, 9)] * 11, spacings)) == (1.0, 3.0, 5.0)
    assert target_spacing(fingerprint([(9, 9, 9)] * 11, [(3.0, 3.0, mm) for mm in thick])) == (3.0, 3.0, 9.0)


def test_patch_is_the_median_image_in_mm() -> None:
    """50 mm in every case, however many voxels: at 1.25 mm, the median, that is 40."""
    found = plan(fingerprint([(50,) * 3, (25,) * 3, (40,) * 3], [(1,) * 3, (2,) * 3, (1.25,) * 3]))
    assert found.spacing_mm == (1.25,) * 3 and found.patch_size == (40,) * 3


def test_large_images_give_a_patch_that_fits() -> None:
    found = plan(one((512, 512, 300), (0.8, 0.8, 1)))
    assert np.prod(found.patch_size) < 1.5 * 96**3
    assert max(found.patch_size) < 1.3 * min(found.patch_size)  # the longest axes are shrunk
    flat = plan(one((512, 512, 20), (0.8, 0.8, 1)))
    assert flat.patch_size == (224, 224, 20)


SHAPES = [(36, 50, 35), (7, 9, 100), (320, 320, 11), (3, 3, 3), (15, 16, 17), (600, 20, 5), (64, 64), (700, 500), (5, 9)]
SPACINGS = [(1.0, 1.0, 1.0), (0.5, 0.5, 7.5), (3.0, 0.4, 1.0)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spacing", SPACINGS)
def test_every_plan_can_be_built(shape: tuple[int, ...], spacing: tuple[float, ...]) -> None:
    axes = len(shape)
    found = plan(one(shape, spacing[:axes]))
    steps = np.array(found.strides, int).reshape(-1, axes)
    divisor = steps.prod(axis=0)
    assert len(found.channels) == len(found.kernel_sizes) == len(steps) + 1 <= 6
    assert all(p % d == 0 and p >= 4 for p, d in zip(found.patch_size, divisor, strict=True))
    assert all(p / d >= 4 for p, d in zip(found.patch_size, divisor, strict=True))  # voxels left at the coarsest stage
    assert set(steps.ravel()) <= {1, 2} and (steps.max(axis=1) == 2).all()
    assert all(k in (1, 3) for kernel in found.kernel_sizes for k in kernel)
    assert all(3 in kernel for kernel in found.kernel_sizes)
    assert all(type(v) is int for v in (*found.patch_size, *found.channels, *itertools.chain(*found.strides)))


def test_two_dimensions() -> None:
    found = plan(one((500, 400), (0.8, 0.8)))
    assert found.patch_size == (512, 416)
    assert found.strides == ((2, 2),) * 5 and found.kernel_sizes == ((3, 3),) * 6
    assert plan(one((28, 28), (1, 1))) == Plan((1, 1), (28, 28), ((2, 2),) * 2, ((3, 3),) * 3, (32, 64, 128))


def test_given_spacing_and_patch_are_kept() -> None:
    data = one((36, 50, 35), (1, 1, 1))
    found = plan(data, spacing_mm=[2, 1, 1])
    assert found.spacing_mm == (2.0, 1.0, 1.0)
    assert found.patch_size == (20, 56, 40)  # the image has 18 voxels of 2 mm; they are halved one time less
    assert found.strides == ((1, 2, 2), (2, 2, 2), (2, 2, 2))
    found = plan(data, patch_size=[45, 30, 16])
    assert found.patch_size == (45, 30, 16)
    assert found.strides == ((2, 2, 2), (2, 2, 2), (2, 1, 1))


@pytest.mark.parametrize(("key", "axes"), [("spacing_mm", 3), ("patch_size", 3), ("spacing_mm", 2), ("patch_size", 2)])
@pytest.mark.parametrize("wrong", ["too few", "too many", "zero", "negative"])
def test_bad_spacing_and_patch(key: str, axes: int, wrong: str) -> None:
    good = [16] * axes
    values = {"too few": good[1:], "too many": [*good, 16], "zero": [0, *good[1:]], "negative": [*good[1:], -1]}[wrong]
    data = one((36, 50, 35)[:axes], (1.0,) * axes)
    with pytest.raises(ValueError, match=rf"data\.{key} needs {axes} positive numbers, one per spatial axis, got \["):
        plan(data, **{key: values})
