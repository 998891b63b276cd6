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


@pytest.mark.parametrize("spacing", [(0.7, 0.7, 0.7), (0.1, 0.3, 0.9)])
def test_a_distance_equal_to_the_tolerance_counts(spacing):
    """2 x 0.7 and 1.4 differ in their last bits, depending on where in the image they lie."""
    for start in range(20):
        a, b = np.zeros((2, 40, 4, 4), bool)
        a[start : start + 10], b[start + 2 : start + 12] = True, True
        assert ours(a, b, spacing, 2 * spacing[0])[0] == 1.0
