"""medconv/features/instances/objects.py: object maps to classes and back, and what looks wrong in them."""

import numpy as np
import pytest
from helpers.object_maps import discs

from medconv.features.instances import objects as module
from medconv.features.instances.objects import BORDER, INTERIOR, classes_of, doubts_of, objects_of


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


def test_more_objects_than_a_label_map_holds_are_an_error(monkeypatch):
    monkeypatch.setattr(module, "HIGHEST", 3)
    with pytest.raises(ValueError, match="^4 objects are predicted, but a label map holds 3 values$"):
        objects_of(classes_of(discs()))


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
        (np.where(discs() == 4, 3, discs()).astype(np.int16), [IN_PIECES]),
    ],
    ids=["right", "empty", "one object", "a mask", "a value twice"],
)
def test_doubts(objects, doubts):
    assert doubts_of(objects) == doubts
