"""medconv/evaluation/case_measurement.py: workers, orientation, faulty cases, and a stated spacing."""

import json
import shutil
from contextlib import nullcontext

import nibabel as nib
import numpy as np
import pytest
from helpers.label_maps import folders, label_of, save, save_spaced, with_names

from medconv.data.io.manifest import MANIFEST
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


def test_distances_are_in_the_spacing_that_training_stated(tmp_path):
    """The headers say 1 x 2 x 3 mm."""
    predictions, references = folders(tmp_path, {"a": label_of(4)}, {"a": label_of(8)})
    before = evaluate(predictions, references)["cases"][0]
    settings = {"source_spacing_mm": {"a": [2, 4, 6]}}
    manifest = {"settings": settings, "overwriting": [], "cases": {}, "class_names": ["background", "1"]}
    (predictions / MANIFEST).write_text(json.dumps(manifest))
    after = evaluate(predictions, references)["cases"][0]
    assert after["hd95_mm"]["1"] == 2 * before["hd95_mm"]["1"] > 0
    assert after["volume_ml"]["1"] == pytest.approx(8 * before["volume_ml"]["1"])
    others = tmp_path / "others"
    shutil.copytree(predictions, others)
    (others / MANIFEST).write_text(json.dumps(manifest | {"settings": {}}))
    for first, second in ((predictions, others), (others, predictions)):  # of the same references
        both = evaluate(first, references, second)
        distances = [part["cases"][0]["hd95_mm"]["1"] for part in (both, both["compare"])]
        assert distances == [after["hd95_mm"]["1"]] * 2
    for spacing, agrees in (([1, 1, 1], False), ([2, 4, 6], True)):  # the latter written in another way
        (others / MANIFEST).write_text(json.dumps(manifest | {"settings": {"source_spacing_mm": spacing}}))
        with nullcontext() if agrees else pytest.raises(ValueError, match=r"^case a: .* is \(2\.0, 4\.0, 6"):
            assert evaluate(predictions, references, others)["comparison"]
    settings["source_spacing_mm"] = {"a": "wide"}
    (predictions / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="prediction.json .*source_spacing_mm.* expected positive"):
        evaluate(predictions, references)
