"""medconv/data/preprocessing/slabs.py: predictions on the native grid, against torch's interpolation."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.restoring import restore
from helpers.waiting import PATIENCE_S
from torch import Tensor
from torch.nn import functional as F

from medconv.data.case import Grid
from medconv.data.preprocessing import slabs
from medconv.data.preprocessing.preprocess import CropInfo
from medconv.data.preprocessing.resampling import nearest
from medconv.data.preprocessing.slabs import SlabGrid
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets

SHAPE = (9, 10, 11)


def whole(shape: tuple[int, ...] = SHAPE, nearest_axis: int | None = None) -> CropInfo:
    grid = Grid.of(shape, np.eye(4))
    return CropInfo(grid, shape, tuple((0, voxels) for voxels in shape), nearest_axis=nearest_axis)


def interpolated(logits: Tensor, shape: tuple[int, ...]) -> Tensor:
    return F.interpolate(logits[None], size=shape, mode="trilinear", align_corners=False)[0]


def from_slabs(
    logits: Tensor, crop: CropInfo, axis: int, monkeypatch: pytest.MonkeyPatch, voxels: int
) -> Tensor:
    """All channels on the content's grid, from slabs of at most so many voxels."""
    monkeypatch.setattr(slabs, "_VOXELS", voxels)
    planes_first = logits.movedim(1 + axis, 1)
    grid = SlabGrid(crop, axis, planes_first.shape[1])
    pieces = [torch.stack(list(grid.channels(planes_first[:, slab.sources], slab))) for slab in grid.slabs()]
    return torch.cat(pieces, 1).movedim(1, 1 + axis)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("size", [(4, 5, 3), (9, 12, 8), (9, 10, 3), (20, 7, 30), (1, 1, 1), SHAPE])
@pytest.mark.parametrize("voxels", [1, 250, 10**6])
def test_slabs_are_the_trilinear_interpolation(
    axis: int, size: tuple[int, ...], voxels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole volume, whatever the size of the slabs; each slab asks for the planes that it needs alone."""
    logits = torch.randn(3, *size, generator=torch.Generator().manual_seed(0))
    result = from_slabs(logits, whole(), axis, monkeypatch, voxels)
    torch.testing.assert_close(result, interpolated(logits, SHAPE), atol=1e-5, rtol=1e-5)
    assert torch.equal(result, from_slabs(logits, whole(), axis, monkeypatch, 10**6))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("nearest_axis", [0, 1, 2])
def test_across_thick_slices_the_nearest_is_taken(
    axis: int, nearest_axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    chosen = torch.from_numpy(nearest(logits.shape[1 + nearest_axis], SHAPE[nearest_axis]))
    expected = interpolated(logits.index_select(1 + nearest_axis, chosen), SHAPE)
    result = from_slabs(logits, whole(nearest_axis=nearest_axis), axis, monkeypatch, 300)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_picture_is_a_volume_of_one_slice(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    expected = F.interpolate(logits[None], size=(9, 10), mode="bilinear", align_corners=False)[0]
    result = from_slabs(logits, whole((9, 10, 1)), axis, monkeypatch, 30)
    torch.testing.assert_close(result[..., 0], expected, atol=1e-5, rtol=1e-5)


def test_a_slab_needs_few_planes_of_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_VOXELS", 110 * 3)
    parts = SlabGrid(whole(), 0, 27).slabs()
    assert [(slab.first, slab.stop) for slab in parts] == [(0, 3), (3, 6), (6, 9)]
    assert [(slab.sources.start, slab.sources.stop) for slab in parts] == [(0, 9), (9, 18), (18, 27)]


@pytest.mark.parametrize("shape", [(4, 5, 3), (9, 12, 8), (9, 10, 3), (9, 10, 11)])
@pytest.mark.parametrize("slices", [False, True])
def test_restoring_gives_the_highest_channel(shape: tuple[int, ...], slices: bool) -> None:
    """The first of equal logits wins. `slices`: the memory layout of stacked slices."""
    logits = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    logits[4] = logits[2]
    logits = logits.transpose(1, 3).contiguous().transpose(1, 3) if slices else logits
    resized = interpolated(logits, SHAPE)
    label = restore(logits, whole())
    np.testing.assert_array_equal(label, resized[:4].argmax(0).numpy())
    assert set(np.unique(label)) == {0, 1, 2, 3}
    decode = LabelMapTargets.of_classes("abcde").decode
    np.testing.assert_array_equal(restore(logits, whole(), decode), label)
    regions = RegionTargets(tuple("abcde"), ((1,),) * 5, None, (3, 1, 5, 2, 4))
    region_label = np.zeros(SHAPE, np.int16)
    for value, region in zip(regions.order, resized.numpy(), strict=True):
        region_label[region > 0] = value
    np.testing.assert_array_equal(restore(logits, whole(), regions.decode), region_label)


def test_restore_does_not_hold_all_channels_on_the_native_grid() -> None:
    """All 30 classes on 80 x 80 x 80 voxels would need 61 MB; one channel needs 2 MB."""
    code = """
import resource, sys, numpy as np, torch
from helpers.restoring import restore
from medconv.data.case import Grid
from medconv.data.preprocessing.preprocess import CropInfo
torch.set_num_threads(1)
grid = Grid.of((80, 80, 80), np.eye(4))
crop_info = CropInfo(grid, grid.shape, ((0, 80),) * 3)
restore(torch.randn(30, 4, 4, 4), CropInfo(Grid.of((8, 8, 8), np.eye(4)), (8, 8, 8), ((0, 8),) * 3))
logits = torch.randn(30, 20, 20, 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
restore(logits, crop_info)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert int(done.stdout) < 30_000  # KB
