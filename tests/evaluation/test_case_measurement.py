"""medconv/evaluation/case_measurement.py: on the grid of the reference; all faulty cases named."""

import nibabel as nib
import numpy as np
import pytest
from helpers.label_maps import folders, label_of, save, save_spaced, with_names

from medconv.evaluation import segmentation


def evaluate(*arguments, **options):
    """The content of the JSON file."""
    return segmentation.evaluate(*arguments, **options).result


def test_the_number_of_workers_does_not_change_the_scores(tmp_path):
    labels = {str(i): label_of(i + 1, 20 - i) for i in range(8)}
    true_labels = {str(i): label_of(9, 9) for i in range(8)}
    predictions, references = folders(tmp_path, labels, true_labels)
    assert evaluate(predictions, references, workers=4) == evaluate(predictions, references)


def test_all_faulty_cases_are_named_at_once(tmp_path):
    good = label_of(3)
    names = ("good", "shape", "affine", "broken", "value", "fraction")
    predictions, references = folders(tmp_path, dict.fromkeys(names, good), dict.fromkeys(names, good))
    with_names(predictions, "background", "one")
    save_spaced(predictions / "shape.nii.gz", good[:-1])
    save(predictions / "affine.nii.gz", good, np.diag([1.0, 2, 4, 1]))
    (references / "broken.nii.gz").write_bytes(b"")
    save_spaced(references / "value.nii.gz", label_of(3, 1))
    save_spaced(predictions / "fraction.nii.gz", good.astype(np.float32) / 2)
    with pytest.raises(ValueError) as error:
        evaluate(predictions, references)
    first, *lines = str(error.value).splitlines()
    assert first == "5 of 6 cases cannot be evaluated"
    errors = dict(line.removeprefix("  case ").split(": ", 1) for line in lines)
    assert (
        f"{predictions}/shape.nii.gz: shape (5, 5, 4) differs from that of {references}/shape.nii.gz, (6, 5, 4)"
        == errors["shape"]
    )
    assert errors["affine"].startswith(f"{predictions}/affine.nii.gz: its affine puts the volume's corners")
    assert errors["broken"] == f"{references}/broken.nii.gz: the file is empty (0 bytes)"
    assert errors["value"] == f"{references}/value.nii.gz: label value 2 is not declared, expected 0 to 1"
    assert (
        errors["fraction"]
        == f"{predictions}/fraction.nii.gz: label values must be whole numbers, found 0.5 at voxel (0, 0, "
        "0); within 0.001 of one they are rounded"
    )


def test_predictions_in_another_orientation_are_turned(tmp_path):
    labels = {"a": label_of(10, 20), "b": label_of(5, 6)}
    predictions, references = folders(tmp_path, labels, labels)
    turned = nib.as_closest_canonical(nib.load(references / "a.nii.gz"))
    flip = nib.orientations.ornt_transform(
        nib.io_orientation(turned.affine), nib.orientations.axcodes2ornt("SAL")
    )
    nib.save(turned.as_reoriented(flip), predictions / "a.nii.gz")
    assert evaluate(predictions, references)["mean"]["dice"] == 1
