"""medconv/features/instances/targets.py: what is kept of a checkpoint, and the scores of several folds."""

import numpy as np
import pytest
from helpers.object_maps import discs

from medconv.features.instances.targets import InstanceTargets
from medconv.targets import Targets

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
