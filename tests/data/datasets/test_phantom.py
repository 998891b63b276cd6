"""medconv/data/datasets/phantom.py: the files it writes, what they hold, and how they appear on disk."""

import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.waiting import PATIENCE_S

from medconv.data.datasets import phantom as phantom_module
from medconv.data.datasets.phantom import LABELS, phantom, write_phantom

_NUM_CASES = {2: 16, 3: 10}


@dataclass
class Dataset:
    spatial_dims: int
    root: Path
    images: list[nib.Nifti1Image]
    labels: list[nib.Nifti1Image]


@pytest.fixture(scope="module", params=[2, 3])
def dataset(request, tmp_path_factory):
    spatial_dims = request.param
    root = tmp_path_factory.mktemp("phantom") / "data"
    write_phantom(root, spatial_dims=spatial_dims, num_cases=_NUM_CASES[spatial_dims])
    images, labels = ([nib.load(f) for f in sorted((root / d).iterdir())] for d in ("imagesTr", "labelsTr"))
    return Dataset(spatial_dims, root, images, labels)


def _values(image):
    return np.asarray(nib.as_closest_canonical(image).dataobj)


def _centre_mm(label, value):
    """Centre of a class from the middle of the field of view, along (R, A, S), by the affine alone."""
    voxels = np.argwhere(np.asarray(label.dataobj) == value)
    middle = (np.array(label.shape) - 1) / 2
    return label.affine[:3, :3] @ (voxels.mean(axis=0) - middle)


def _bytes(root):
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}


def test_layout_is_that_of_the_decathlon(dataset):
    content = json.loads((dataset.root / "dataset.json").read_text())
    num_cases = _NUM_CASES[dataset.spatial_dims]
    assert {"name", "description", "licence"} <= content.keys()
    assert content["modality"] == {"0": "MRI"}
    assert content["labels"] == {str(value): name for value, name in enumerate(LABELS)}
    assert (content["numTraining"], content["numTest"], len(content["training"])) == (num_cases, 0, num_cases)
    assert content["training"][0] == {
        "image": "./imagesTr/phantom_000.nii.gz",
        "label": "./labelsTr/phantom_000.nii.gz",
    }
    listed = {Path(file).as_posix() for case in content["training"] for file in case.values()}
    assert listed | {"dataset.json"} == _bytes(dataset.root).keys()


def test_image_and_label_share_one_grid(dataset):
    for image, label in zip(dataset.images, dataset.labels, strict=True):
        assert image.shape == label.shape and len(image.shape) == 3
        assert (image.shape[2] == 1) == (dataset.spatial_dims == 2)
        for nifti in (image, label):
            assert int(nifti.header["sform_code"]) == int(nifti.header["qform_code"]) == 1
            np.testing.assert_array_equal(nifti.affine, image.affine)
            np.testing.assert_allclose(nifti.get_qform(), nifti.get_sform(), atol=1e-4)


def test_sizes_lie_in_the_documented_range(dataset):
    for image in dataset.images:
        sizes = nib.as_closest_canonical(image).shape
        low, high = {2: ((87, 87, 1), (149, 149, 1)), 3: ((43, 43, 24), (65, 65, 39))}[dataset.spatial_dims]
        assert np.all(sizes >= np.array(low)) and np.all(sizes <= np.array(high))


def test_all_classes_occur_and_the_lesion_is_sometimes_absent(dataset):
    values = [set(np.unique(np.asarray(label.dataobj))) for label in dataset.labels]
    assert set.union(*values) == set(range(len(LABELS)))
    assert all(set(range(5)) <= present for present in values)
    with_lesion = np.mean([LABELS.index("lesion") in present for present in values])
    assert 0.5 <= with_lesion < 1
    assert all(label.get_data_dtype() == np.uint8 for label in dataset.labels)


def test_spacing_varies_and_is_anisotropic(dataset):
    spacings_mm = np.array([nib.as_closest_canonical(image).header.get_zooms() for image in dataset.images])
    np.testing.assert_allclose(spacings_mm[:, 0], spacings_mm[:, 1], rtol=1e-5)
    assert np.ptp(spacings_mm[:, 0]) > 0.2
    if dataset.spatial_dims == 3:
        assert np.ptp(spacings_mm[:, 2]) > 0.4
        assert np.all(spacings_mm[:, 2] > 1.05 * spacings_mm[:, 0])


def test_orientation_varies_but_anatomy_does_not(dataset):
    assert len({nib.aff2axcodes(label.affine) for label in dataset.labels}) >= 3
    for label in dataset.labels:
        canonical = nib.as_closest_canonical(label)
        for side, name in ((1, "large_organ"), (-1, "medium_organ"), (-1, "small_organ")):
            value = LABELS.index(name)
            assert side * _centre_mm(label, value)[0] > 5
            assert side * _centre_mm(canonical, value)[0] > 5
            assert side * (np.argwhere(_values(label) == value)[:, 0].mean() - canonical.shape[0] / 2) > 3


def test_organs_differ_in_size_and_lesion_lies_in_the_large_organ(dataset):
    for label in dataset.labels:
        values = _values(label)
        large, medium, small = (np.count_nonzero(values == value) for value in (1, 2, 3))
        assert large > 1.3 * medium > 1.3 * 1.3 * small
        lesion = np.argwhere(values == LABELS.index("lesion"))
        neighbours = {values[tuple(voxel + step)] for voxel in lesion for step in np.eye(3, dtype=int)[:2]}
        assert neighbours <= {LABELS.index("large_organ"), LABELS.index("lesion")}


def test_lesion_is_a_ball_of_4_to_7_mm(dataset):
    for label in dataset.labels:
        voxels = np.argwhere(_values(label) == LABELS.index("lesion"))
        if len(voxels) == 0:
            continue
        spacing_mm = np.array(nib.as_closest_canonical(label).header.get_zooms())
        measure = len(voxels) * np.prod(spacing_mm[: dataset.spatial_dims])
        radius_mm = (
            np.sqrt(measure / np.pi) if dataset.spatial_dims == 2 else np.cbrt(measure * 3 / (4 * np.pi))
        )
        assert 3.5 < radius_mm < 8
        extent_mm = (np.ptp(voxels, axis=0) + 1)[: dataset.spatial_dims] * spacing_mm[: dataset.spatial_dims]
        assert extent_mm.max() < 2 * extent_mm.min()


def _tube_sections(vessel, spacing_mm, axis, parts):
    """Cross-section of each part of a tube that runs along `axis`: its measure by the length of its centre
    line.
    """
    slices = np.flatnonzero(vessel.any(axis=tuple(a for a in range(3) if a != axis)))[1:-1]
    sections = []
    for part in np.array_split(slices, parts):
        voxels = [np.argwhere(np.take(vessel, [i], axis)) for i in part]
        centres_mm = np.array([v.mean(axis=0) for v in voxels]) * spacing_mm
        centres_mm[:, axis] = part * spacing_mm[axis]
        length_mm = np.linalg.norm(np.diff(centres_mm, axis=0), axis=1).sum() * len(part) / (len(part) - 1)
        sections.append(sum(map(len, voxels)) * np.prod(spacing_mm[: axis + 1]) / length_mm)
    return np.array(sections)


def test_vessel_has_one_radius_in_mm_and_crosses_the_field_of_view(dataset):
    axis = dataset.spatial_dims - 1
    for label in dataset.labels:
        vessel = _values(label) == LABELS.index("vessel")
        spacing_mm = np.array(nib.as_closest_canonical(label).header.get_zooms())
        sections = _tube_sections(vessel, spacing_mm, axis, parts=3)
        radii_mm = sections / 2 if axis == 1 else np.sqrt(sections / np.pi)
        assert np.all((radii_mm > 2.6) & (radii_mm < 3.6)), radii_mm
        crossed = np.ptp(np.argwhere(vessel)[:, axis]) + 1
        assert crossed > 0.6 * vessel.shape[axis]


def test_tissues_are_ordered_by_intensity_and_organs_share_theirs(dataset):
    look_alikes = []
    ratios = []  # per case, to the large organ: within one case the bias field can hide a contrast
    for image, label in zip(dataset.images, dataset.labels, strict=True):
        signal, values = _values(image).astype(np.float64), _values(label)
        mean = [signal[values == value].mean() if np.any(values == value) else np.nan for value in range(6)]
        ratios.append([*np.array(mean[1:]) / mean[1], signal[:4, :4].mean() / mean[1]])
        look_alikes.append(np.count_nonzero((values == 0) & (signal > 0.9 * min(mean[2], mean[3]))))
    _, medium, small, vessel, lesion, air = np.nanmean(ratios, axis=0)
    assert 0.85 < medium / small < 1.15
    assert 1.1 < medium < 1.6 and vessel > 1.2 * medium
    assert lesion < 0.7 and air < 0.25
    assert np.median(look_alikes) > 20  # the distractor: no threshold finds the organs


def test_intensity_scale_differs_and_keeps_precision(dataset):
    tops = np.array([np.quantile(_values(image), 0.99) for image in dataset.images])
    assert tops.max() > 30 * tops.min()
    for image, top in zip(dataset.images, tops, strict=True):
        assert image.get_data_dtype() == (np.float32 if top < 400 else np.int16) or 300 < top < 600
        assert _values(image).max() < np.iinfo(np.int16).max
        assert len(np.unique(_values(image))) > 200


@pytest.mark.parametrize("spatial_dims", [2, 3])
def test_same_seed_writes_the_same_bytes(tmp_path, spatial_dims):
    def write(name, num_cases, seed):
        return _bytes(
            write_phantom(tmp_path / name, spatial_dims=spatial_dims, num_cases=num_cases, seed=seed)
        )

    first, second = write("first", 2, 5), write("elsewhere/second", 2, 5)
    assert len(first) == 5 and first == second
    longer, other = write("longer", 3, 5), write("other", 2, 6)
    for file in first.keys() - {"dataset.json"}:
        assert longer[file] == first[file]  # case i depends on (seed, i) only
        assert other[file] != first[file]
    assert first["imagesTr/phantom_000.nii.gz"] != first["imagesTr/phantom_001.nii.gz"]


def test_absent_dataset_is_written(tmp_path):
    dataset = phantom(tmp_path / "phantom", spatial_dims=2, num_cases=2)
    assert len(dataset.cases) == 2 and all(path.is_file() for case in dataset.cases for path in case.files)
    assert dataset.class_names[0] == "background"


def test_existing_dataset_is_kept(tmp_path, caplog):
    root = write_phantom(tmp_path / "data", spatial_dims=2, num_cases=2)
    before = {f: f.stat().st_mtime_ns for f in root.rglob("*")}
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert write_phantom(root, spatial_dims=2, num_cases=2) == root
        assert not caplog.records
        write_phantom(root, spatial_dims=2, num_cases=3)
    assert "2-D, 3 cases" in caplog.text  # kept, but not silently
    assert {f: f.stat().st_mtime_ns for f in root.rglob("*")} == before


def _fail_after(calls, real):
    def write(root, name, *rest):
        if name >= f"phantom_{calls:03d}":
            raise OSError("disk full")
        real(root, name, *rest)

    return write


def test_interrupted_write_leaves_no_half_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(phantom_module, "_write_case", _fail_after(1, phantom_module._write_case))
    with pytest.raises(OSError, match="disk full"):
        write_phantom(tmp_path / "data", spatial_dims=2, num_cases=3)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert len(_bytes(write_phantom(tmp_path / "data", spatial_dims=2, num_cases=3))) == 7


def test_concurrent_writers_leave_one_complete_dataset(tmp_path, monkeypatch):
    barrier, publish, errors = threading.Barrier(3), phantom_module._publish, []

    def publish_together(partial, root):
        barrier.wait(timeout=PATIENCE_S)
        publish(partial, root)

    def write():
        try:
            write_phantom(tmp_path / "data", spatial_dims=2, num_cases=2)
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(phantom_module, "_publish", publish_together)
    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert errors == []
    assert [f.name for f in tmp_path.iterdir()] == ["data"]
    assert _bytes(tmp_path / "data") == _bytes(write_phantom(tmp_path / "alone", spatial_dims=2, num_cases=2))


def test_folder_with_other_files_is_an_error_and_unchanged(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"new or empty folder.*holds no dataset\.json.*another folder"):
        write_phantom(tmp_path)
    with pytest.raises(ValueError, match="new or empty folder"):
        write_phantom(tmp_path / "notes.txt")
    assert _bytes(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spatial_dims": 4}, "spatial_dims must be 2 or 3, got 4"),
        ({"num_cases": 0}, "num_cases must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_arguments_out_of_range_are_errors(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        write_phantom(tmp_path / "data", **arguments)
    assert list(tmp_path.iterdir()) == []
