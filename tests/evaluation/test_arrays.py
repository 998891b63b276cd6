"""medconv/evaluation/arrays.py: label maps in memory have the scores of their files."""

import nibabel
import numpy as np
import pytest
import torch
from helpers.label_maps import folders, label_of

from medconv.evaluation import arrays, segmentation
from medconv.metrics.segmentation import MetricSelection
from medconv.targets.label_map import LabelMapTargets

PREDICTIONS = {"a": label_of(10, 20), "b": label_of(5, 6), "c": label_of(4)}
REFERENCES = {"a": label_of(12, 16), "b": label_of(5, 6), "c": label_of(0, 3), "d": label_of(1)}
SPACING_MM = (1, 2, 3)  # of `folders`


@pytest.mark.parametrize("selection", [MetricSelection(), MetricSelection(lesion_iou=0.5, centreline=True)])
def test_scores_are_those_of_files(tmp_path, selection):
    tolerance_mm = {None: 2, "1": 0.5}
    of_files = segmentation.evaluate(
        *folders(tmp_path, PREDICTIONS, REFERENCES), tolerance_mm=tolerance_mm, selection=selection
    ).result
    result = arrays.evaluate(
        PREDICTIONS, REFERENCES, SPACING_MM, tolerance_mm=tolerance_mm, selection=selection
    )
    assert result == {key: of_files[key] for key in ("mean", "per_class", "statistics", "cases")}


def test_a_plane_is_measured_in_two_dimensions():
    flat = np.zeros((8, 8), bool)
    flat[2:5, 2:5] = True
    result = arrays.evaluate({"a": flat}, {"a": np.roll(flat, 1, 1)}, {"a": (1, 2)})
    assert result["mean"]["hd95_mm"] == 2 and result["mean"]["dice"] == pytest.approx(2 / 3)


def test_the_value_to_ignore_counts_as_background():
    targets = LabelMapTargets.of_classes(("background", "organ"), ignore=9)
    reference = label_of(10)
    reference[reference == 0] = 9
    result = arrays.evaluate({"a": label_of(20)}, {"a": reference}, SPACING_MM, targets)
    assert result["mean"]["dice"] == 1


@pytest.mark.parametrize(
    "prediction, spacing_mm, error",
    [
        (
            label_of(3)[1:],
            SPACING_MM,
            r"case a: the prediction has shape \(5, 5, 4\), its reference \(6, 5, 4",
        ),
        (label_of(3) / 2, SPACING_MM, "prediction of case a: expected label values that are integers, got f"),
        (label_of(3)[0, 0], SPACING_MM, r"prediction of case a: expected shape \(X, Y, Z\)"),
        (label_of(3).astype(int) - 1, SPACING_MM, "prediction of case a: expected label values of 0 or more"),
        (label_of(3, 2), SPACING_MM, "prediction of case a: label value 2 is not declared"),
        (label_of(3), (1, 2), "spacing_mm must be 3 positive numbers for case a"),
        (label_of(3), {"b": SPACING_MM}, "spacing_mm: case a is missing; there are b"),
    ],
)
def test_errors_name_the_case(prediction, spacing_mm, error):
    with pytest.raises(ValueError, match=error):
        arrays.evaluate({"a": prediction}, {"a": label_of(3)}, spacing_mm, ("background", "organ"))


def test_an_error_names_the_case_where_no_classes_are_given():
    with pytest.raises(ValueError, match="prediction of case a: expected label values that are integers"):
        arrays.evaluate({"a": label_of(1) * np.nan}, {"a": label_of(1)}, SPACING_MM)


@pytest.mark.parametrize("targets", ["organ", {"background": 0, "organ": 1}])
def test_names_of_classes_are_a_list(targets):
    with pytest.raises(ValueError, match="targets must be a list of names, from the background on, got "):
        arrays.evaluate({"a": label_of(1)}, {"a": label_of(1)}, SPACING_MM, targets)


def test_a_case_without_reference_is_named():
    with pytest.raises(ValueError, match="references: case a is missing; there are b"):
        arrays.evaluate({"a": label_of(1)}, {"b": label_of(1)}, SPACING_MM)
    with pytest.raises(ValueError, match="predictions has no case"):
        arrays.evaluate({}, {"b": label_of(1)}, SPACING_MM)


def test_cases_without_names_are_numbered():
    assert list(arrays.by_case([label_of(1), label_of(2)], "predictions")) == ["0", "1"]
    assert list(arrays.by_case(label_of(1), "predictions")) == ["0"]
    assert list(arrays.by_case(torch.from_numpy(label_of(1)), "predictions")) == ["0"]


@pytest.mark.parametrize("form", [lambda image: image, lambda image: [image], lambda image: {"0": image}])
def test_an_image_of_nibabel_is_no_array(form):
    image = nibabel.Nifti1Image(label_of(1).astype(np.uint8), np.eye(4))
    with pytest.raises(ValueError, match="references: case 0 must be an array, got Nifti1Image; .*dataobj"):
        arrays.by_case(form(image), "references")
