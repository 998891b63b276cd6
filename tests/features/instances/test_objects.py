"""medconv/features/instances/: objects from their classes, matched objects, and targets."""

import json
import re

import nibabel as nib
import numpy as np
import pytest
from helpers.object_maps import discs
from PIL import Image

from medconv.data.case import Grid
from medconv.data.io.writing import write_label
from medconv.data.preprocessing.preprocess import PreprocessingConfig, preprocess_image, preprocess_label
from medconv.features.instances.evaluation import evaluate, page
from medconv.features.instances.layout import instances
from medconv.features.instances.matching import THRESHOLDS, means_of, row_of, scores_of
from medconv.features.instances.objects import BORDER, INTERIOR, classes_of, doubts_of, objects_of
from medconv.features.instances.targets import InstanceTargets
from medconv.targets import Targets


def two_balls():
    """Two balls that touch in one plane. Shape: (20, 12, 12)."""
    positions = np.indices((20, 12, 12)).T - np.array([5, 6, 6])
    objects = (np.linalg.norm(positions, axis=-1) <= 4.5).T.astype(np.int16)
    objects[((np.linalg.norm(positions - [9, 0, 0], axis=-1) <= 4.5).T) & (objects == 0)] = 7
    return objects


def same_objects(first, second):
    """Whether two maps have the same objects, whatever their values."""
    pairs = np.unique(np.stack([first.ravel(), second.ravel()]), axis=1)
    return len(np.unique(pairs[0])) == len(np.unique(pairs[1])) == pairs.shape[1]


@pytest.mark.parametrize("objects", [discs(), two_balls()], ids=["2D", "3D"])
def test_touching_objects_come_back_from_their_classes(objects):
    answer = objects_of(classes_of(objects))
    assert answer.dtype == np.int16
    assert same_objects(answer, objects)


def test_a_slice_has_no_border_across_itself():
    classes = classes_of(discs()[..., None])
    np.testing.assert_array_equal(classes[..., 0], classes_of(discs()))


def test_the_border_is_one_voxel_wide_within_the_object():
    objects = np.zeros((7, 9), np.int16)
    objects[1:6, 1:8] = 5
    expected = np.zeros_like(objects)
    expected[1:6, 1:8] = BORDER
    expected[2:5, 2:7] = INTERIOR
    np.testing.assert_array_equal(classes_of(objects), expected)


def test_an_object_without_interior_is_all_interior():
    objects = np.zeros((6, 6), np.int16)
    objects[2:4, 2:4] = 3
    np.testing.assert_array_equal(classes_of(objects), np.where(objects, INTERIOR, 0))


def test_thin_objects_that_touch_stay_apart():
    """Two bars of two voxels side by side, none of which has an interior."""
    objects = np.zeros((6, 9), np.int16)
    objects[1:3, 1:8] = 1
    objects[3:5, 1:8] = 2
    assert same_objects(objects_of(classes_of(objects)), objects)


def test_a_border_without_interior_is_no_object():
    assert not objects_of(np.full((4, 4), BORDER, np.int16)).any()


def test_more_objects_than_a_label_map_holds_are_scored_but_not_written(tmp_path):
    """The speckle of a network that has hardly been trained."""
    classes = np.zeros((400, 400, 1), np.int16)
    classes[::2, ::2] = INTERIOR
    objects = objects_of(classes)
    assert objects.max() == 40_000 and row_of(objects, np.zeros_like(objects))["predicted"] == 40_000
    nib.save(nib.Nifti1Image(np.zeros(classes.shape, np.float32), np.eye(4)), tmp_path / "image.nii.gz")
    with pytest.raises(ValueError, match=r"a\.nii\.gz: 40000 objects are predicted"):
        write_label(tmp_path / "a.nii.gz", objects, tmp_path / "image.nii.gz")


def test_names_and_values_of_files_are_those_of_objects(tmp_path):
    """Masks of 0 and 255 are one object each; as classes they would be refused beside two names."""
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
        for number in range(2):
            Image.fromarray(np.eye(8, dtype=np.uint8) * 255).save(tmp_path / folder / f"{number}.png")
    dataset = instances(str(tmp_path / "images"), str(tmp_path / "labels"))
    assert dataset.class_names == ("background", "interior", "border")
    assert [case.relabel for case in dataset.cases] == [None, None]


IN_PIECES = "some values are those of several objects, or of one in pieces: 3"


@pytest.mark.parametrize(
    ("objects", "doubts"),
    [
        (discs(), []),
        (np.zeros((5, 5), np.int16), []),
        ((discs() == 3).astype(np.int16), []),
        (
            (discs() > 0).astype(np.int16),
            ["all objects have one value, so those that touch are one; each object needs its own"],
        ),
        (
            np.where(discs() > 0, 1200, 0).astype(np.int16),
            ["all objects have one value, so those that touch are one; each object needs its own"],
        ),
        (np.where(discs() == 4, 3, discs()).astype(np.int16), [IN_PIECES]),
    ],
    ids=["right", "empty", "one object", "a mask", "a mask of a high value", "a value twice"],
)
def test_doubts(objects, doubts):
    assert doubts_of(objects) == doubts


def a_case():
    """A prediction with one object of IoU 1, one of 0.6, and a wrong one; the reference misses none of 3."""
    reference = np.zeros((10, 10), np.int16)
    reference[0:2, 0:5] = 1
    reference[4:6, 0:5] = 9
    reference[8:10, 0:5] = 4
    prediction = np.zeros_like(reference)
    prediction[0:2, 0:5] = 2
    prediction[4:6, 0:3] = 1
    prediction[0:3, 7:10] = 5
    return prediction, reference


def squares(edge, spacing_mm):
    """Sixteen squares or cubes that touch in a plane."""
    numbers = np.arange(1, 17).reshape(4, 4).repeat(edge, 0).repeat(edge, 1)
    axes = len(spacing_mm)
    objects = np.pad(numbers, 2)[..., None].repeat(1 if axes == 2 else edge, 2)
    return objects.astype(np.int16), Grid.of(objects.shape, np.diag([*spacing_mm, 1, 1][:3] + [1]))


@pytest.mark.parametrize(
    ("native_mm", "target_mm"),
    [
        ((1, 1), (1, 1)),
        ((1, 1), (2.2, 2.2)),
        ((1, 1), (0.5, 0.5)),
        ((1, 1), (2.5, 0.4)),
        ((1, 1, 1), (2.2, 2.2, 1)),
        ((1, 1, 5), (1, 1, 1)),
        ((1, 1, 5), (1.7, 2, 5)),
    ],
)
def test_objects_that_touch_stay_apart_on_any_grid(native_mm, target_mm):
    objects, grid = squares(12, native_mm)
    config = PreprocessingConfig(len(target_mm), target_mm, ("none",), ({},))
    _, crop_info = preprocess_image(np.ones((1, *objects.shape), np.float32), grid, config)
    label = preprocess_label(objects, crop_info, config, 3, classes_of)
    assert label.dtype == np.uint8 and set(np.unique(label)) == {0, INTERIOR, BORDER}
    found = objects_of(label)
    assert found.max() == 16
    resampled = preprocess_label(objects, crop_info, config, 17)
    assert scores_of(row_of(found, resampled))["ap75"] == 1


def test_a_case_by_hand():
    row = row_of(*a_case())
    assert row["reference"] == 3
    assert row["predicted"] == 3
    assert row["matched"] == [2, 2, 2, 1, 1, 1, 1, 1, 1]
    assert row["overlaps"] == pytest.approx(1.6)
    scores = scores_of(row)
    assert scores["ap50"] == pytest.approx(2 / 4)  # matched, over matched, missed and wrong
    assert scores["ap75"] == pytest.approx(1 / 5)
    assert scores["ap"] == pytest.approx((3 * 2 / 4 + 6 * 1 / 5) / 9)
    assert scores["pq"] == pytest.approx(1.6 / 3)
    assert scores["dice"] == pytest.approx(2 * 16 / (25 + 30))


def test_a_case_without_objects_is_undefined():
    empty = np.zeros((4, 4), np.int16)
    assert set(scores_of(row_of(empty, empty)).values()) == {None}


def test_a_wrong_object_in_an_empty_image_counts():
    prediction = np.eye(4, dtype=np.int16)
    assert scores_of(row_of(prediction, np.zeros_like(prediction)))["ap"] == 0


def test_means_are_over_cases_with_objects():
    empty = np.zeros((4, 4), np.int16)
    prediction, reference = a_case()
    means = means_of([row_of(prediction, reference), row_of(reference, reference), row_of(empty, empty)])
    assert means["ap50"] == pytest.approx((0.5 + 1) / 2)
    assert means["ap_per_threshold"] == pytest.approx([0.75] * 3 + [0.6] * 6)
    assert len(means["ap_per_threshold"]) == len(THRESHOLDS)
    assert means["ap50_pooled"] == pytest.approx(5 / 7)  # 2 and 3 matched, of 4 and 3
    assert means["reference_objects"] == 6
    assert means["predicted_objects"] == 6


TARGETS = InstanceTargets()


def test_targets_survive_a_checkpoint():
    assert Targets.from_plain(TARGETS.plain()) == TARGETS


def test_scores_over_folds_are_over_all_cases_and_over_the_means_of_folds():
    right = TARGETS.dice(discs(), discs())
    half = TARGETS.dice(np.where(discs() > 2, 0, discs()), discs())
    folds = [{"a": right, "b": right}, {"c": half}]
    scores = TARGETS.scores.over_folds(folds)
    assert scores["mean"]["ap50"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert scores["statistics"]["ap50"]["mean_of_folds"] == pytest.approx((1 + 0.5) / 2)
    lines = dict(TARGETS.scores.over_folds_lines(scores, 3))
    assert lines["mean of folds"][0] == pytest.approx(0.75)
    assert TARGETS.scores.case_scores(folds[1]) == {"c": 0.5}
    columns = dict(TARGETS.scores.columns(TARGETS.scores.summary(folds[1])))
    assert columns["AP at 0.5"] == 0.5


def test_the_table_of_cases_counts_objects_and_the_monitored_score_ranks_cases():
    prediction, reference = a_case()
    row = row_of(np.where(prediction == 5, 0, prediction), reference)
    cells = TARGETS.scores.case_cells(row)
    assert (cells["objects"], cells["predicted_objects"]) == (3, 2)
    scores = scores_of(row)
    assert TARGETS.scores.case_scores({"a": row}) == {"a": scores["ap"]}
    assert scores["ap"] != scores["ap50"]


def test_one_of_two_values_in_pieces_is_no_mask():
    objects = np.zeros((9, 9), np.int16)
    objects[:2, :2], objects[6:8, 6:8], objects[:2, 6:8] = 3, 3, 5
    assert doubts_of(objects) == [IN_PIECES]


def test_the_page_has_the_worst_case_first(tmp_path):
    objects = discs()
    for folder in ("predictions", "references"):
        (tmp_path / folder).mkdir()
    for number, missing in enumerate((0, 2, 1)):
        found = np.where(objects <= missing, 0, objects).astype(np.uint8)
        Image.fromarray(found).save(tmp_path / f"predictions/case{number}.png")
        Image.fromarray(objects.astype(np.uint8)).save(tmp_path / f"references/case{number}.png")
    manifest = {"targets": TARGETS.plain()}
    (tmp_path / "predictions/prediction.json").write_text(json.dumps(manifest))
    text = page(evaluate(tmp_path / "predictions", tmp_path / "references"))
    assert re.findall(r"<h3>(case\d)", text) == ["case1", "case2", "case0"]
