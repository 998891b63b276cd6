"""medconv/data/io/class_masks.py: labels that are a mask for each class."""

import re
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest

from medconv.data.case_files import label_of, label_on
from medconv.data.datasets.folder import folder
from medconv.data.io.formats import without_structures
from medconv.data.io.images import read_label, stamp
from medconv.data.per_case import with_annotated
from medconv.data.preprocessing.examine import examine
from medconv.evaluation.segmentation import evaluate

SHAPE = (6, 5, 4)
LIVER, SPLEEN = (slice(1, 4), 2, slice(None)), (3, slice(1, 4), slice(None))  # they overlap


def _write(path, array, affine=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, np.diag([1, 2, 3, 1]) if affine is None else affine), path)


def _mask(where, value=1):
    mask = np.zeros(SHAPE, np.uint8)
    if where is not None:
        mask[where] = value
    return mask


@pytest.fixture
def root(tmp_path):
    """Two cases: images, and a mask for each of three classes, one of them empty."""
    for case in ("p1", "p_2"):
        _write(tmp_path / case / "ct.nii.gz", np.random.default_rng(0).normal(size=SHAPE).astype(np.float32))
        for name, where in (("liver", LIVER), ("spleen_left", SPLEEN), ("tumour", None)):
            _write(tmp_path / case / "masks" / f"{name}.nii.gz", _mask(where))
    return tmp_path


def _dataset(root, labels="{id}/masks/{class}.nii.gz", **settings):
    return folder("{id}/ct.nii.gz", labels, root=str(root), **settings)


def _expected(liver=1, spleen=2):
    label = np.zeros(SHAPE, np.int16)
    label[LIVER] = liver
    label[SPLEEN] = spleen
    return label


def test_all_classes_that_have_masks_are_learned(root):
    dataset = _dataset(root)
    assert dataset.class_names == ("background", "liver", "spleen_left", "tumour")
    assert dataset.case_ids == ["p1", "p_2"] and not dataset.errors
    label, grid = label_of(dataset.cases[0])
    np.testing.assert_array_equal(label, _expected())  # the later class counts where they overlap
    assert grid.spacing_mm == (1, 2, 3)


def test_class_names_or_the_pattern_choose_classes(root):
    by_names = _dataset(root, class_names=["background", "spleen_left", "liver"])
    by_pattern = _dataset(root, "{id}/masks/{class}.nii.gz#roi=spleen_left;liver")
    for dataset in (by_names, by_pattern):
        assert dataset.class_names == ("background", "spleen_left", "liver")
        label, _ = label_of(dataset.cases[1])
        expected = _expected(liver=1, spleen=1)
        expected[LIVER] = 2
        np.testing.assert_array_equal(label, expected)


def test_names_of_classes_and_of_masks_are_matched(root):
    dataset = _dataset(
        root,
        "{id}/masks/{class}.nii.gz#roi=liver;spleen_left",
        class_names=["background", "Spleen left", "liver"],
    )
    np.testing.assert_array_equal(label_of(dataset.cases[0])[0], _expected(liver=2, spleen=1))


def test_masks_in_one_folder_are_told_from_ids_by_the_names_of_classes(root):
    for case in ("p1", "p_2"):
        for name in ("liver", "spleen_left"):
            (root / case / "masks" / f"{name}.nii.gz").rename(root / f"{case}_{name}.nii.gz")
    dataset = _dataset(root, "{id}_{class}.nii.gz", class_names=["background", "liver", "spleen_left"])
    assert dataset.case_ids == ["p1", "p_2"] and not dataset.errors
    np.testing.assert_array_equal(label_of(dataset.cases[1])[0], _expected())


def test_masks_are_turned_to_their_image(root):
    flipped = np.diag([-1, 2, 3, 1.0])
    flipped[0, 3] = SHAPE[0] - 1
    _write(root / "p1" / "masks" / "liver.nii.gz", _mask(LIVER, 255)[::-1], flipped)
    case = _dataset(root).cases[0]
    grid = read_label(root / "p1" / "masks" / "tumour.nii.gz")[1]
    np.testing.assert_array_equal(label_on(case, grid), _expected())


def test_many_classes_make_no_name_too_long(root):
    names = [f"a_class_of_a_long_name_{number:02d}" for number in range(20)]
    for number, name in enumerate(names):
        _write(root / "p1" / "masks" / f"{name}.nii.gz", _mask((0, 0, number % 4)))
    dataset = _dataset(root, class_names=["background", *names])
    report = examine(dataset.cases[0], dataset)
    assert report.class_voxels[1:] == (0,) * 16 + (1,) * 4  # the later ones cover the others
    assert not report.errors and not report.warnings
    assert len(stamp(dataset.cases[0].label)) == 2


def test_a_replaced_mask_is_seen(root):
    label = _dataset(root).cases[0].label
    before = stamp(label)
    _write(root / "p1" / "masks" / "tumour.nii.gz", _mask(LIVER))
    assert stamp(label) != before


@pytest.mark.parametrize(
    ("replaced", "error"),
    [
        (None, "liver.nii.gz: no such file; expected a mask of each class, empty if the case has none"),
        (np.arange(120, dtype=np.uint8).reshape(SHAPE), "expected a mask of 0 and one other value"),
        (np.zeros((6, 5, 3), np.uint8), "liver.nii.gz"),  # another grid
    ],
)
def test_wrong_masks_are_errors_of_their_case(root, replaced, error):
    path = root / "p1" / "masks" / "liver.nii.gz"
    case = _dataset(root).cases[0]
    path.unlink()
    if replaced is not None:
        _write(path, replaced)
    with pytest.raises(ValueError, match=error):
        label_of(case)


def test_a_case_may_lack_masks_that_it_does_not_annotate(root):
    (root / "p1" / "masks" / "liver.nii.gz").unlink()
    dataset = with_annotated(_dataset(root), {"p1": ["spleen_left", "tumour"]})
    label, _ = label_of(dataset.cases[0])
    assert label.max() == 2 and (label == 1).sum() == 0


@pytest.mark.parametrize("images", ["{id}/{class}.nii.gz", {"ct": "{id}/{class}.nii.gz"}])
def test_images_have_no_classes(root, images):
    with pytest.raises(ValueError, match="{class} is for labels, which may be a mask for each class"):
        folder(images, "{id}/masks/{class}.nii.gz", root=str(root))


def test_names_may_have_other_letters_than_files(root):
    (root / "p1" / "masks" / "liver.nii.gz").rename(root / "p1" / "masks" / "Liver.nii.gz")
    dataset = _dataset(root, class_names=["background", "LIVER", "Spleen left"])
    assert not dataset.errors
    for case in dataset.cases:
        np.testing.assert_array_equal(label_of(case)[0], _expected())


def test_a_mask_of_the_background_is_no_class(root):
    for case in ("p1", "p_2"):
        _write(root / case / "masks" / "Background.nii.gz", _mask(LIVER))
    assert _dataset(root).class_names == ("background", "liver", "spleen_left", "tumour")


@pytest.mark.parametrize("name", ["a;b", "a|b", "a/b"])
def test_names_that_a_path_cannot_list_are_refused(root, name):
    with pytest.raises(ValueError, match=re.escape(f"the class {name!r} cannot be a part of a file's name")):
        _dataset(root, class_names=["background", "liver", name])


def test_a_mask_beside_its_image_by_a_part_of_a_voxel_is_doubted(root):
    shifted = np.diag([1, 2, 3, 1.0])
    shifted[0, 3] = 0.05
    _write(root / "p1" / "masks" / "liver.nii.gz", _mask(LIVER), shifted)
    dataset = _dataset(root)
    (warning,) = examine(dataset.cases[0], dataset).warnings
    assert "liver.nii.gz" in warning and "taken as one grid" in warning
    stated = replace(dataset.cases[1], source_spacing_mm=(2.0, 2.0, 2.0))
    assert not examine(stated, dataset).warnings


def test_a_case_may_annotate_none_of_the_classes(root):
    dataset = with_annotated(
        _dataset(root, "{id}/masks/{class}.nii.gz#roi=liver", class_names=["background", "liver"]), {}
    )
    case = replace(dataset.cases[0], label=without_structures(dataset.cases[0].label, [1]))
    assert not label_of(case)[0].any()


def test_masks_need_the_names_of_predicted_values(root, tmp_path):
    _write(tmp_path / "predictions" / "p1.nii.gz", _expected().astype(np.uint8))
    with pytest.raises(
        ValueError, match="nothing beside the predictions names their classes; add #roi=NAME;NAME"
    ):
        evaluate(tmp_path / "predictions", root / "{id}/masks/{class}.nii.gz")


def test_evaluate_matches_masks_with_predictions_by_name(root, tmp_path):
    predictions = tmp_path / "predictions"
    dataset = _dataset(root, class_names=["background", "spleen_left", "liver"])
    predicted, _ = label_of(dataset.cases[0])
    for case in ("p1", "p_2"):
        _write(predictions / f"{case}.nii.gz", predicted.astype(np.uint8))
    (predictions / "prediction.json").write_text('{"class_names": ["background", "spleen_left", "liver"]}')
    (root / "p1" / "masks" / "spleen_left.nii.gz").unlink()
    result = evaluate(predictions, root / "{id}/masks/{class}.nii.gz", annotated=["p1=liver"]).result
    rows = {row["case"]: row["dice"] for row in result["cases"]}
    assert rows == {"p1": {"spleen_left": None, "liver": 1}, "p_2": {"spleen_left": 1, "liver": 1}}
