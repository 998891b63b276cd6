"""medconv/features/image_level/plots.py: plots for all target types, without cases and with unusual names."""

import warnings

import numpy as np
import pytest
from helpers.image_level_outputs import FINDINGS, FOUR, NUMBERS, TWO, drawn

from medconv.features.image_level import plots
from medconv.features.image_level.multiclass import MulticlassTargets

ODD = MulticlassTargets(("_hidden", "$\\frac{", "two\nlines and very much longer than any name", "肺炎"))
CURVES = {"confusion", "roc", "precision_recall", "reliability"}


@pytest.mark.parametrize(
    ("targets", "cases"),
    [(TWO, 1), (FOUR, 0), (FINDINGS, 0), (FINDINGS, 50), (NUMBERS, 0), (NUMBERS, 1), (ODD, 50)],
)
def test_each_kind_of_targets_has_its_pictures(targets, cases):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pictures = targets.pictures(*drawn(targets, cases))
    assert set(pictures) == ({"scatter"} if targets is NUMBERS else CURVES)
    for picture in pictures.values():
        assert picture.dtype == np.uint8 and picture.shape[2] == 3 and picture.flags.c_contiguous
        assert picture.std() > 5


def test_pictures_of_many_names_stay_small():
    many = MulticlassTargets(tuple(f"class {i}" for i in range(60)))
    for picture in many.pictures(*drawn(many, 100)).values():
        assert max(picture.shape) <= 1500


def test_nan_outputs_give_pictures():
    for targets in (TWO, FINDINGS, NUMBERS):
        outputs, truth = drawn(targets, 5)
        assert targets.pictures(outputs * np.nan, truth)


def test_right_predictions_are_dark_on_the_diagonal():
    truth = np.array([[0.0], [1.0]] * 5)
    right = np.eye(2)[truth[:, 0].astype(int)]
    good, bad = (TWO.pictures(outputs, truth)["confusion"].astype(int) for outputs in (right, 1 - right))
    height, width, _ = good.shape
    corner = slice(height // 8, height // 3), slice(width // 2 - width // 8, width // 2)
    assert good[corner].mean() < bad[corner].mean() - 50


def test_a_long_name_is_shortened_to_one_line_without_formulas():
    assert plots._plain("two\nlines") == "two lines"
    assert plots._plain("$x$") == r"\$x\$"
    assert len(plots._plain("a" * 40)) == len(plots._plain("b" * 24)) == 24


def test_a_legend_names_what_it_leaves_out():
    figure, axes = plots._one_panel()
    empty = plots._pixels(figure)
    plots._add_legend(axes, hidden_curves=3, undefined=["a", "b", "c", "d"])
    assert axes.texts[0].get_text() == "and 3 more\nundefined: a, b, c, …"
    assert not np.array_equal(plots._pixels(figure), empty)


def test_equal_scores_share_a_step_of_the_curve():
    """Scores 0.9 (with), 0.5 (one with and one without), 0.1 (without): two ways up, the middle one a
    slope.
    """
    false, true = plots.roc_points(np.array([0.1, 0.9, 0.5, 0.5]), np.array([False, True, True, False]))
    assert false.tolist() == [0, 0, 0.5, 1] and true.tolist() == [0, 0.5, 1, 1]


def test_precision_and_recall_of_equal_scores():
    """Scores 0.9 (with), 0.5 (one with and one without), 0.1 (without)."""
    scores = np.array([0.1, 0.9, 0.5, 0.5])
    precision, recall = plots.precision_recall_points(scores, np.array([False, True, True, False]))
    assert precision.tolist() == [1, 2 / 3, 0.5]
    assert recall.tolist() == [0.5, 1, 1]
