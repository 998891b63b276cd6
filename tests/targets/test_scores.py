"""medconv/targets/scores.py: Dice of names that a case is annotated for."""

import numpy as np
import pytest

from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets

CLASSES = LabelMapTargets.of_classes(["background", "a", "b"])
REGIONS = RegionTargets(("lesion", "core"), ((1, 2), (2,)), None, (1, 2))


def test_dice_of_a_class_that_is_not_annotated_is_undefined() -> None:
    prediction, reference = np.array([1, 1, 2, 0]), np.array([0, 1, 2, 2])
    assert CLASSES.dice(prediction, reference) == {"a": pytest.approx(2 / 3), "b": pytest.approx(2 / 3)}
    assert CLASSES.dice(prediction, reference, (True, False, True)) == {"a": None, "b": pytest.approx(2 / 3)}
    row = REGIONS.dice(prediction, reference, REGIONS.annotated_outputs((2,)))
    assert row == {"lesion": None, "core": pytest.approx(2 / 3)}
