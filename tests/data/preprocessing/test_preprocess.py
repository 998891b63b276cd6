"""medconv/data/preprocessing/preprocess.py: to the grid of the network and back, compared with nibabel."""

from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import ranks
from helpers.restoring import restore
from helpers.tiny import PYTHONPATH
from helpers.volumes import (
    CLASSES,
    ORIENTATIONS,
    affine_of,
    dice,
    image_array,
    label_array,
    preprocessing_config,
    rotation,
    save,
    tiny,
    write_nnunet,
)
from torch.nn import functional as F

from medconv.data.case import Grid
from medconv.data.datasets.dataset_json import nnunet
from medconv.data.io.grids import to_canonical
from medconv.data.io.images import read_image, read_label
from medconv.data.preprocessing import preprocess
from medconv.data.preprocessing.preprocess import (
    CropInfo,
    PreprocessingConfig,
    SlabGrid,
    content_box,
    preprocess_case,
    preprocess_image,
    preprocess_label,
    resampled_shape,
)
from medconv.data.preprocessing.resampling import nearest
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets

SPACING_MM = (0.7, 1.1, 1.9)  # of the array axes, whichever way they point
SHAPE = (5, 6, 7)
SLAB_SHAPE = (9, 10, 11)


def one_hot(label, num_classes):
    return torch.from_numpy(np.stack([label == value for value in range(num_classes)]).astype(np.float32))


def with_border(seed=0, shape=SHAPE):
    """An image that is 0 in a border, of a different width on each side, and a random label inside."""
    rng = np.random.default_rng(seed)
    image, label = np.zeros((1, *shape), np.float32), np.zeros(shape, np.int16)
    inside = (slice(1, 5), slice(0, 4), slice(2, 6))
    image[(0, *inside)] = rng.uniform(1, 2, image[(0, *inside)].shape)
    label[inside] = rng.integers(0, 4, label[inside].shape)
    return image, label


def canonical_spacing(axes):
    return tuple(SPACING_MM[axes.index(world)] for world in range(3))


@pytest.mark.parametrize(("axes", "signs"), ORIENTATIONS)
def test_round_trip_in_every_orientation(axes, signs):
    affine = affine_of(axes, signs, SPACING_MM, (-50, 20, 1000))
    image, label = with_border()
    grid, config = Grid.of(SHAPE, affine), preprocessing_config(canonical_spacing(axes))
    array, crop_info = preprocess_image(image, grid, config)
    prepared = preprocess_label(label, crop_info, config, 4)

    canonical = nib.as_closest_canonical(nib.Nifti1Image(image[0], affine))
    reference = np.asanyarray(canonical.dataobj)
    where = np.argwhere(reference)
    box = tuple(slice(a, b + 1) for a, b in zip(where.min(0), where.max(0), strict=True))
    np.testing.assert_array_equal(array[0], reference[box])
    assert to_canonical(image, grid)[1] == pytest.approx(canonical.header.get_zooms())
    assert crop_info.slices == box and crop_info.shape == reference.shape

    back = restore(one_hot(prepared, 4), crop_info)
    assert back.dtype == np.int16 and back.flags.c_contiguous
    np.testing.assert_array_equal(back, label)


def blob(shape, affine, centre_mm, radii_mm):
    """The distance of each voxel from the centre, in radii."""
    voxels = np.stack([*np.meshgrid(*[np.arange(n) for n in shape], indexing="ij"), np.ones(shape)])
    positions = np.einsum("ij,jxyz->ixyz", affine[:3], voxels)
    return np.linalg.norm(
        (positions - centre_mm[:, None, None, None]) / radii_mm[:, None, None, None], axis=0
    )


@pytest.mark.parametrize(("axes", "signs"), ORIENTATIONS[::7])
@pytest.mark.parametrize("target_mm", [(1.3, 0.9, 1.6), (0.6, 0.8, 2.2)])
def test_resampled_round_trip_keeps_a_smooth_shape(axes, signs, target_mm):
    shape = (26, 24, 22)
    affine = affine_of(axes, signs, (0.9, 1.1, 1.4), (7, 8, 9))
    centre = affine[:3] @ [12, 13, 10, 1]
    distance = blob(shape, affine, centre, np.array([7.0, 9.0, 8.0]))
    label = (distance < 1).astype(np.int16) + (distance < 0.7)
    image = np.ones((1, *shape), np.float32)
    image[:, :2] = 0
    config = preprocessing_config(target_mm)
    array, crop_info = preprocess_image(image, Grid.of(shape, affine), config)
    prepared = preprocess_label(label, crop_info, config, 3)
    assert array.shape[1:] == prepared.shape != crop_info.shape
    back = restore(one_hot(prepared, 3), crop_info)
    assert back.shape == shape
    for value in (1, 2):
        assert dice(back >= value, label >= value) > 0.9


def centre_of_mass(mass):
    return np.array([(index * mass).sum() / mass.sum() for index in np.indices(mass.shape)])


@pytest.mark.parametrize(("axes", "signs"), ORIENTATIONS[::11])
def test_a_point_keeps_its_position_in_mm(axes, signs):
    """The centre of mass of a blob; the new grid starts at the edge of the content."""
    shape, native_mm, target_mm = (34, 28, 16), (0.8, 1.0, 2.1), np.array([1.1, 0.7, 1.9])
    affine = affine_of(axes, signs, native_mm, (30, -20, 5))
    centre = affine[:3] @ [17.3, 13.6, 7.2, 1]
    weight = np.exp(-0.5 * blob(shape, affine, centre, np.array([2.0, 2.0, 2.0])) ** 2)
    image = (1 + weight).astype(np.float32)[None]
    image[:, :3] = 0
    image[..., -2:] = 0
    label = (weight > 0.4).astype(np.int16)
    config = preprocessing_config(tuple(target_mm))
    array, crop_info = preprocess_image(image, Grid.of(shape, affine), config)
    prepared = preprocess_label(label, crop_info, config, 2)

    canonical = nib.as_closest_canonical(nib.Nifti1Image(image[0], affine)).affine
    edge_mm = canonical[:3] @ [*(a - 0.5 for a, _ in crop_info.box), 1]
    expected = (centre - edge_mm) / target_mm - 0.5
    for mass in (array[0] - 1, prepared):
        np.testing.assert_allclose(centre_of_mass(mass), expected, atol=0.5)
    # exact with the actual spacing, which differs from the target because the shape is in whole voxels
    spacing_mm = np.diff(crop_info.box)[:, 0] * np.diag(canonical)[:3] / array.shape[1:]
    position_mm = edge_mm + (centre_of_mass(array[0] - 1) + 0.5) * spacing_mm
    np.testing.assert_allclose(position_mm, centre, atol=0.02)


def test_resampled_shape():
    assert resampled_shape((10, 20, 30), (1, 1, 2), (2, 1, 0.5)) == (5, 20, 120)
    assert resampled_shape((3, 3, 3), (1, 1, 1), (100, 1, 1)) == (1, 3, 3)
    assert resampled_shape((10, 20, 1), (1, 1, 5), (2, 2)) == (5, 10, 1)


def test_an_image_that_is_made_smaller_is_blurred_before():
    """Stripes of one voxel become grey, not a coarser pattern, as in scikit-image's resize."""
    stripes = np.zeros((1, 60, 12, 1), np.float32)
    stripes[:, ::2] = 1
    config = replace(preprocessing_config((1, 1)), frame=(13, 12), resize=(13, 12))
    array, _ = preprocess_image(stripes, Grid.of((60, 12, 1), np.eye(4)), config)
    assert array.shape == (1, 13, 12)
    np.testing.assert_allclose(array[0, 2:-2], 0.5, atol=0.02)
    larger = replace(config, frame=(60, 24), resize=(60, 24))
    array, _ = preprocess_image(stripes, Grid.of((60, 12, 1), np.eye(4)), larger)
    np.testing.assert_allclose(array[0, :, 12], stripes[0, :, 6, 0], atol=1e-6)


@pytest.mark.parametrize(("num_classes", "dtype"), [(3, np.uint8), (256, np.uint8), (257, np.int16)])
def test_a_prepared_label_has_the_smallest_dtype(num_classes, dtype):
    label = np.zeros((4, 4, 4), np.int16)
    label[0, 0, 0] = num_classes - 1
    _, crop_info = preprocess_image(
        np.ones((1, 4, 4, 4), np.float32), Grid.of((4, 4, 4), np.eye(4)), preprocessing_config((1, 1, 1))
    )
    prepared = preprocess_label(label, crop_info, preprocessing_config((1, 1, 1)), num_classes)
    assert prepared.dtype == dtype and prepared.max() == num_classes - 1


@pytest.mark.parametrize("shape", [(9, 11), (9, 11, 1)])
@pytest.mark.parametrize("signs", [(1, 1, 1), (-1, 1, 1), (-1, -1, 1)])
def test_a_slice_is_turned_as_slices_of_volumes_are(tmp_path, shape, signs):
    rng = np.random.default_rng(0)
    image, label = rng.uniform(1, 2, shape).astype(np.float32), rng.integers(0, 3, shape).astype(np.uint8)
    image[:2], label[:2] = 0, 0
    affine = affine_of((1, 0, 2), signs, (0.5, 0.8, 6), (0, 0, 0))
    for name, array in (("image", image), ("label", label)):
        nib.save(nib.Nifti1Image(array, affine), tmp_path / f"{name}.nii")
    read, grid = read_image([tmp_path / "image.nii"])
    array, crop_info = preprocess_image(read, grid, preprocessing_config((0.8, 0.5)))
    # The second axis of the file runs from left to right, or back; the first from posterior to anterior
    right, anterior = np.array(signs)[[1, 0]]
    np.testing.assert_array_equal(array[0], image.reshape(9, 11)[2:].T[::right, ::anterior])
    native = read_label(tmp_path / "label.nii")[0]
    prepared = preprocess_label(native, crop_info, preprocessing_config((0.8, 0.5)), 3)
    assert prepared.shape == (11, 7)
    np.testing.assert_array_equal(restore(one_hot(prepared, 3), crop_info), native)


def test_a_slice_is_resampled_in_its_plane():
    grid = Grid.of((40, 30, 1), np.diag([1, 1, 9, 1]))
    distance = np.hypot(*np.meshgrid(np.arange(40) - 18, np.arange(30) - 15, indexing="ij"))
    label = (distance < 9).astype(np.int16)[..., None]
    config = preprocessing_config((1.4, 0.8))
    array, crop_info = preprocess_image(np.ones((1, 40, 30, 1), np.float32), grid, config)
    assert array.shape == (1, 29, 38)
    prepared = preprocess_label(label, crop_info, config, 2)
    back = restore(one_hot(prepared, 2), crop_info)
    assert back.shape == (40, 30, 1) and dice(back > 0, label > 0) > 0.95


def normalised(values, name, **known):
    image = values.astype(np.float32).reshape(1, -1, 1, 1)
    grid = Grid.of((*image.shape[1:], 2), np.eye(4))
    statistics = {"percentile_00_5": 0.0, "percentile_99_5": 0.0, "mean": 0.0, "std": 0.0, **known}
    config = PreprocessingConfig(3, (1, 1, 1), (name,), (statistics,))
    return preprocess_image(np.repeat(image, 2, axis=3), grid, config)[0][0, :, 0, 0]


def test_each_normalisation_gives_the_expected_numbers():
    values = np.array([1.0, 2.0, 3.0, 6.0])  # mean 3, standard deviation sqrt(3.5)
    np.testing.assert_allclose(
        normalised(values, "zscore"), np.array([-2, -1, 0, 3]) / np.sqrt(3.5), rtol=1e-5
    )
    np.testing.assert_allclose(normalised(values, "rescale"), [0, 0.2, 0.4, 1], rtol=1e-6)
    np.testing.assert_array_equal(normalised(values, "none"), values)
    window = {"percentile_00_5": 1.5, "percentile_99_5": 5.0, "mean": 2.0, "std": 4.0}
    np.testing.assert_allclose(normalised(values, "ct", **window), [-0.125, 0, 0.25, 0.75])
    np.testing.assert_allclose(normalised(values, "dataset", **window), [-0.25, 0, 0.25, 1])


def test_each_channel_has_its_own_normalisation():
    image = np.arange(1, 17, dtype=np.float32).reshape(2, 2, 2, 2)
    window = {"percentile_00_5": 9.0, "percentile_99_5": 12.0, "mean": 10.0, "std": 2.0}
    config = PreprocessingConfig(3, (1, 1, 1), ("rescale", "ct"), ({}, window))
    array, _ = preprocess_image(image, Grid.of((2, 2, 2), np.eye(4)), config)
    np.testing.assert_allclose(array[0].ravel(), np.arange(8) / 7, rtol=1e-6)
    np.testing.assert_allclose(array[1].ravel(), [-0.5, 0, 0.5, 1, 1, 1, 1, 1])


def test_an_unknown_normalisation_or_a_bad_spacing_is_an_error():
    with pytest.raises(ValueError, match=r"normalisation must be one of .*'zscore'.* got \['minmax'\]"):
        PreprocessingConfig(3, (1, 1, 1), ("ct", "minmax"), ({}, {}))
    for spacing in ((1.0, 1.0), (1.0, 1.0, 0.0), (1.0, -1.0, 1.0), (1.0, 1.0, float("nan"))):
        with pytest.raises(ValueError, match=r"spacing_mm needs 3 positive numbers in mm, got"):
            PreprocessingConfig(3, spacing, ("ct",), ({},))


def test_oblique_grids_are_reoriented_to_their_nearest_axes():
    affine = np.eye(4)
    affine[:3, :3] = rotation((8, -12, 5)) @ np.diag([1, 1, 3]) @ np.eye(3)[[2, 0, 1]]
    image, label = with_border()
    grid = Grid.of(SHAPE, affine)
    canonical = nib.as_closest_canonical(nib.Nifti1Image(image[0], affine))
    reoriented, spacing = to_canonical(image, grid)
    np.testing.assert_array_equal(reoriented[0], np.asanyarray(canonical.dataobj))
    assert spacing == pytest.approx(canonical.header.get_zooms()[:3])
    config = preprocessing_config(spacing)
    _, crop_info = preprocess_image(image, grid, config)
    prepared = preprocess_label(label, crop_info, config, 4)
    np.testing.assert_array_equal(restore(one_hot(prepared, 4), crop_info), label)


def test_restore_takes_logits_of_any_precision_and_size():
    """Four times finer: an edge after the first of 4 voxels is an edge after the fourth of 16."""
    crop_info = CropInfo(Grid.of((16, 8, 8), np.eye(4)), (16, 8, 8), ((0, 16), (2, 6), (0, 8)))
    logits = torch.full((3, 4, 2, 4), -5.0, dtype=torch.bfloat16)
    logits[0] = 0
    logits[2, 1:] = 5
    back = restore(logits, crop_info)
    expected = np.zeros((16, 8, 8))
    expected[4:, 2:6] = 2
    np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize("seed", range(5))
def test_the_content_box_is_that_of_all_voxels_that_are_not_zero(seed):
    rng = np.random.default_rng(seed)
    image = np.where(rng.random((2, 6, 7, 5)) < 0.02, rng.normal(size=(2, 6, 7, 5)), 0)
    image[0, 3, 2, 4] = np.nan
    indices = np.nonzero((image != 0).any(0))
    assert content_box(image) == tuple(slice(i.min(), i.max() + 1) for i in indices)
    assert content_box(0 * np.nan_to_num(image)) == (slice(0, 6), slice(0, 7), slice(0, 5))


def whole(shape=SLAB_SHAPE, nearest_axis=None):
    grid = Grid.of(shape, np.eye(4))
    return CropInfo(grid, shape, tuple((0, voxels) for voxels in shape), nearest_axis=nearest_axis)


def interpolated(logits, shape):
    return F.interpolate(logits[None], size=shape, mode="trilinear", align_corners=False)[0]


def from_slabs(logits, crop, axis, monkeypatch, voxels):
    """All channels on the content's grid, from slabs of at most so many voxels."""
    monkeypatch.setattr(preprocess, "_VOXELS", voxels)
    planes_first = logits.movedim(1 + axis, 1)
    grid = SlabGrid(crop, axis, planes_first.shape[1])
    pieces = [torch.stack(list(grid.channels(planes_first[:, slab.sources], slab))) for slab in grid.slabs()]
    return torch.cat(pieces, 1).movedim(1, 1 + axis)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("size", [(4, 5, 3), (9, 12, 8), (9, 10, 3), (20, 7, 30), (1, 1, 1), SLAB_SHAPE])
@pytest.mark.parametrize("voxels", [1, 250, 10**6])
def test_slabs_are_the_trilinear_interpolation(axis, size, voxels, monkeypatch):
    """Of the whole volume, whatever the size of the slabs; each slab asks for the planes that it needs alone."""
    logits = torch.randn(3, *size, generator=torch.Generator().manual_seed(0))
    result = from_slabs(logits, whole(), axis, monkeypatch, voxels)
    torch.testing.assert_close(result, interpolated(logits, SLAB_SHAPE), atol=1e-5, rtol=1e-5)
    assert torch.equal(result, from_slabs(logits, whole(), axis, monkeypatch, 10**6))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("nearest_axis", [0, 1, 2])
def test_across_thick_slices_the_nearest_is_taken(axis, nearest_axis, monkeypatch):
    logits = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    chosen = torch.from_numpy(nearest(logits.shape[1 + nearest_axis], SLAB_SHAPE[nearest_axis]))
    expected = interpolated(logits.index_select(1 + nearest_axis, chosen), SLAB_SHAPE)
    result = from_slabs(logits, whole(nearest_axis=nearest_axis), axis, monkeypatch, 300)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_picture_is_a_volume_of_one_slice(axis, monkeypatch):
    logits = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    expected = F.interpolate(logits[None], size=(9, 10), mode="bilinear", align_corners=False)[0]
    result = from_slabs(logits, whole((9, 10, 1)), axis, monkeypatch, 30)
    torch.testing.assert_close(result[..., 0], expected, atol=1e-5, rtol=1e-5)


def test_a_slab_needs_few_planes_of_the_prediction(monkeypatch):
    monkeypatch.setattr(preprocess, "_VOXELS", 110 * 3)
    parts = SlabGrid(whole(), 0, 27).slabs()
    assert [(slab.first, slab.stop) for slab in parts] == [(0, 3), (3, 6), (6, 9)]
    assert [(slab.sources.start, slab.sources.stop) for slab in parts] == [(0, 9), (9, 18), (18, 27)]


@pytest.mark.parametrize("shape", [(4, 5, 3), (9, 12, 8), (9, 10, 3), (9, 10, 11)])
@pytest.mark.parametrize("slices", [False, True])
def test_restoring_gives_the_highest_channel(shape, slices):
    """The first of equal logits wins. `slices`: the memory layout of stacked slices."""
    logits = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    logits[4] = logits[2]
    logits = logits.transpose(1, 3).contiguous().transpose(1, 3) if slices else logits
    resized = interpolated(logits, SLAB_SHAPE)
    label = restore(logits, whole())
    np.testing.assert_array_equal(label, resized[:4].argmax(0).numpy())
    assert set(np.unique(label)) == {0, 1, 2, 3}
    decode = LabelMapTargets.of_classes("abcde").decode
    np.testing.assert_array_equal(restore(logits, whole(), decode), label)
    regions = RegionTargets(tuple("abcde"), ((1,),) * 5, None, (3, 1, 5, 2, 4))
    region_label = np.zeros(SLAB_SHAPE, np.int16)
    for value, region in zip(regions.order, resized.numpy(), strict=True):
        region_label[region > 0] = value
    np.testing.assert_array_equal(restore(logits, whole(), regions.decode), region_label)


def test_restore_does_not_hold_all_channels_on_the_native_grid(tmp_path):
    """All 30 classes on 80 x 80 x 80 voxels would need 61 MB; one channel needs 2 MB."""
    (tmp_path / "restores.py").write_text("""
import resource, sys, numpy as np, torch
from helpers.restoring import restore
from medconv.data.case import Grid
from medconv.data.datasets.dataset_json import nnunet
from medconv.data.preprocessing.preprocess import CropInfo
torch.set_num_threads(1)
grid = Grid.of((80, 80, 80), np.eye(4))
crop_info = CropInfo(grid, grid.shape, ((0, 80),) * 3)
restore(torch.randn(30, 4, 4, 4), CropInfo(Grid.of((8, 8, 8), np.eye(4)), (8, 8, 8), ((0, 8),) * 3))
logits = torch.randn(30, 20, 20, 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
restore(logits, crop_info)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
""")
    done = ranks.python(tmp_path / "restores.py", cwd=tmp_path, PYTHONPATH=PYTHONPATH)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 30_000  # KB


def test_a_prepared_case_has_image_label_and_foreground(tmp_path):
    (case,) = nnunet(write_nnunet(tmp_path, 1)).cases
    entry = preprocess_case(case, preprocessing_config(channels=2), 3)
    np.testing.assert_array_equal(entry.image, [image_array(0), image_array(0) + 100])
    assert entry.image.dtype == np.float32 and entry.label.dtype == np.uint8
    np.testing.assert_array_equal(entry.label, label_array(0))
    assert entry.foreground.dtype == np.int32
    assert entry.foreground.shape == (np.count_nonzero(label_array(0)), 4)  # class and position
    for value, *where in entry.foreground:
        assert label_array(0)[tuple(where)] == value
    assert len(np.unique(entry.foreground, axis=0)) == len(entry.foreground)


def test_a_large_value_to_ignore_is_kept_beside_few_classes(tmp_path):
    (case,) = tiny(tmp_path, 1).cases
    label = label_array(0).astype(np.int16)
    label[0] = 300
    save(case.files[1], label)
    entry = preprocess_case(case, preprocessing_config(), 3, LabelMapTargets.of_classes(CLASSES, 300))
    np.testing.assert_array_equal(entry.label, label)
    labelled = entry.foreground[entry.foreground[:, 0] == 0]
    assert len(labelled) == np.count_nonzero(label != 300) and labelled[:, 1].min() == 1


def test_foreground_positions_are_spread_over_a_large_class(tmp_path):
    (case,) = tiny(tmp_path, 1).cases
    label = np.ones((30, 30, 30), np.uint8)
    label[0, 0, :3] = 2
    save(case.files[0], image_array(0, (30, 30, 30)))
    save(case.files[1], label)
    foreground = preprocess_case(case, preprocessing_config(), 3).foreground
    big, small = foreground[foreground[:, 0] == 1], foreground[foreground[:, 0] == 2]
    assert len(big) == 5_000 and len(small) == 3
    assert big[:, 1].min() == 0 and big[:, 1].max() > 25 and abs(big[:, 1].mean() - 14.5) < 3


def test_a_case_without_foreground_has_no_positions(tmp_path):
    dataset = tiny(tmp_path / "data", 1)
    save(dataset.cases[0].files[-1], np.zeros_like(label_array(0)))
    entry = preprocess_case(dataset.cases[0], preprocessing_config(), 3)
    assert entry.foreground.shape == (0, 4)
