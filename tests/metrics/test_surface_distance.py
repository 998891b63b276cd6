"""medconv/metrics/surface_distance.py: against all pairs of points, MONAI, DeepMind's package, and by hand."""

import numpy as np
import pytest
import torch
from monai.metrics import compute_average_surface_distance, compute_hausdorff_distance, compute_surface_dice
from reference import surfaces as oracle
from scipy.ndimage import gaussian_filter, shift

from medconv.data.io.images import read_label
from medconv.metrics import surface_distance

pytestmark = pytest.mark.filterwarnings("ignore:.*always_return_as_numpy:FutureWarning")  # MONAI's own
GRIDS = [((9, 8, 7), (1.0, 1.0, 1.0)), ((10, 9, 6), (0.7, 1.3, 5.0)), ((14, 12), (0.5, 2.0))]


def blobs(shape, seed):
    """Two ragged masks that resemble each other and reach the array's edge."""
    rng = np.random.default_rng(seed)
    field = gaussian_filter(rng.normal(size=shape), 1.2)
    return field > 0.05, field + gaussian_filter(rng.normal(size=shape), 1) * 0.4 > 0.05


def ours(a, b, spacing, tolerance):
    voxels, elements = (
        surface_distance.voxel_distances(a, b, spacing),
        surface_distance.element_distances(a, b, spacing),
    )
    return (
        surface_distance.surface_dice(elements, tolerance),
        surface_distance.hd95(voxels),
        surface_distance.average_distance(voxels),
    )


def monais(a, b, spacing, tolerance):
    one, two = (torch.as_tensor(mask)[None, None].float() for mask in (a, b))
    same = {"include_background": True, "spacing": spacing}
    return (
        compute_surface_dice(one, two, [tolerance], use_subvoxels=True, **same).item(),
        compute_hausdorff_distance(one, two, percentile=95, **same).item(),
        compute_average_surface_distance(one, two, symmetric=True, **same).item(),
    )


def deepminds(a, b, spacing, tolerance):
    package = pytest.importorskip("surface_distance", reason="pip install surface-distance")
    return package.compute_surface_dice_at_tolerance(
        package.compute_surface_distances(a, b, spacing), tolerance
    )


@pytest.mark.parametrize(("shape", "spacing"), GRIDS)
@pytest.mark.parametrize("seed", range(3))
def test_distances_equal_those_of_all_pairs(shape, spacing, seed):
    a, b = blobs(shape, seed)
    for measured, places in (
        (surface_distance.voxel_distances, oracle.boundary),
        (surface_distance.element_distances, oracle.corners),
    ):
        distances, (there, back) = measured(a, b, spacing), oracle.directed(a, b, spacing, places)
        np.testing.assert_allclose(distances.there, there, atol=1e-9)
        np.testing.assert_allclose(distances.back, back, atol=1e-9)
    voxels = surface_distance.voxel_distances(a, b, spacing)
    assert surface_distance.hd95(voxels) == pytest.approx(oracle.hd95(a, b, spacing), abs=1e-9)
    assert surface_distance.average_distance(voxels) == pytest.approx(
        oracle.average_distance(a, b, spacing), abs=1e-9
    )


@pytest.mark.parametrize(("shape", "spacing"), GRIDS)
@pytest.mark.parametrize("tolerance", [0.0, 0.8, 1.4, 3.0])
def test_metrics_equal_those_of_monai_and_deepmind(shape, spacing, tolerance):
    for seed in range(4):
        a, b = blobs(shape, seed)
        assert ours(a, b, spacing, tolerance) == pytest.approx(monais(a, b, spacing, tolerance), rel=1e-5)
    pytest.importorskip("surface_distance", reason="pip install surface-distance")
    for seed in range(4):
        a, b = blobs(shape, seed)
        assert ours(a, b, spacing, tolerance)[0] == pytest.approx(
            deepminds(a, b, spacing, tolerance), rel=1e-5
        )


@pytest.mark.realdata
def test_real_cases_equal_monai_deepmind_and_all_pairs(realdata):
    """Hippocampus: the reference against itself moved by half a voxel and smoothed, and against another
    case.
    """
    files = sorted((realdata / "Task04_Hippocampus/labelsTr").glob("hippocampus_*.nii.gz"))[:2]
    pytest.importorskip("surface_distance", reason="pip install surface-distance")
    for k, path in enumerate(files):
        label, grid = read_label(path)
        other, _ = read_label(files[k - 1])
        spacing = (grid.spacing_mm[0], 0.8, 1.7)  # as if sampled unevenly: these are 1 mm cubes
        for value in (1, 2):
            a = label == value
            moved = shift(gaussian_filter(a.astype(float), 0.7), (0.5, -0.5, 0)) > 0.5
            placed = np.zeros_like(a)
            overlap = tuple(slice(0, min(m, n)) for m, n in zip(a.shape, other.shape, strict=True))
            placed[overlap] = (other == value)[overlap]
            for b in (moved, placed):
                metrics = ours(b, a, spacing, 1.0)
                assert 0 < metrics[0] < 1
                assert metrics == pytest.approx(monais(b, a, spacing, 1.0), rel=1e-5)
                assert metrics[0] == pytest.approx(deepminds(a, b, spacing, 1.0), rel=1e-5)
                box = tuple(slice(max(0, i.min() - 1), i.max() + 2) for i in np.nonzero(a | b))
                assert metrics[1] == pytest.approx(oracle.hd95(b[box], a[box], spacing))
                assert metrics[2] == pytest.approx(oracle.average_distance(b[box], a[box], spacing))


def test_a_mask_agrees_with_itself():
    a, _ = blobs((9, 8, 7), 0)
    assert ours(a, a, (1.0, 2.0, 3.0), 0.0) == (1.0, 0.0, 0.0)


def test_two_voxels_have_the_distance_computed_by_hand():
    """Two single voxels, 3 apart along an axis of 2 mm: every distance is 6 mm."""
    a, b = np.zeros((2, 5, 5, 5), bool)
    a[2, 1, 2] = b[2, 4, 2] = True
    voxels = surface_distance.voxel_distances(a, b, (1.0, 2.0, 1.0))
    assert (surface_distance.hd95(voxels), surface_distance.average_distance(voxels)) == (6.0, 6.0)
    assert ours(a, b, (1.0, 2.0, 1.0), 6.0)[0] == 1.0
    assert ours(a, b, (1.0, 2.0, 1.0), 3.9)[0] == 0.0  # the facing sides are 4 mm apart


@pytest.mark.parametrize("spacing", [(0.7, 0.7, 0.7), (0.1, 0.3, 0.9)])
def test_a_distance_equal_to_the_tolerance_counts(spacing):
    """2 x 0.7 and 1.4 differ in their last bits, depending on where in the image they lie."""
    for start in range(20):
        a, b = np.zeros((2, 40, 4, 4), bool)
        a[start : start + 10], b[start + 2 : start + 12] = True, True
        assert ours(a, b, spacing, 2 * spacing[0])[0] == 1.0


def test_hd95_is_the_larger_of_both_directions():
    """A long thin prediction on a small reference: only one direction is far."""
    a, b = np.zeros((2, 40, 3), bool)
    a[:, 1], b[:2, 1] = True, True
    assert surface_distance.hd95(surface_distance.voxel_distances(a, b, (1.0, 1.0))) == pytest.approx(
        np.percentile(np.r_[0, 0, 1:39], 95)
    )
    assert surface_distance.hd95(surface_distance.voxel_distances(b, a, (1.0, 1.0))) == pytest.approx(
        np.percentile(np.r_[0, 0, 1:39], 95)
    )


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (0.5, 1.0, 2.5)])
def test_elements_add_up_to_the_area_of_a_ball(spacing):
    """15 mm radius; stairs are longer than the surface that they stand for, most where slices are thick."""
    axes = [np.arange(-16, 16.01, mm) for mm in spacing]
    ball = sum(x**2 for x in np.meshgrid(*axes, indexing="ij")) <= 15**2
    area = surface_distance.element_distances(ball, ball, spacing).there_area.sum()
    assert area == pytest.approx(4 * np.pi * 15**2, rel=0.25)
