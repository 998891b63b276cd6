"""medconv/metrics/plots.py: plots for all target types, without cases and with unusual names."""

import warnings

import numpy as np
import pytest
from helpers.image_level_outputs import FINDINGS, FOUR, NUMBERS, TWO, drawn

from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.multiclass import MulticlassTargets

ODD = MulticlassTargets(("_hidden", "$\\frac{", "two\nlines and very much longer than any name", "肺炎"))

CURVES = {"confusion", "roc", "precision_recall", "reliability"}


@pytest.mark.parametrize(
    "targets", [TWO, FOUR, FINDINGS, NUMBERS, ODD], ids=lambda o: f"{len(o.names)} {o.kind}"
)
@pytest.mark.parametrize("cases", [0, 1, 50])
def test_each_kind_of_targets_has_its_pictures(targets: ImageLevelTargets, cases: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pictures = targets.pictures(*drawn(targets, cases))
    assert set(pictures) == ({"scatter"} if targets is NUMBERS else CURVES)
    for picture in pictures.values():
        assert picture.dtype == np.uint8 and picture.shape[2] == 3 and picture.flags.c_contiguous
        assert picture.std() > 5


def test_pictures_of_many_names_stay_small() -> None:
    many = MulticlassTargets(tuple(f"class {i}" for i in range(60)))
    for picture in many.pictures(*drawn(many, 100)).values():
        assert max(picture.shape) <= 1500


def test_nan_outputs_give_pictures() -> None:
    for targets in (TWO, FINDINGS, NUMBERS):
        outputs, truth = drawn(targets, 5)
        assert targets.pictures(outputs * np.nan, truth)


def test_right_predictions_are_dark_on_the_diagonal() -> None:
    truth = np.array([[0.0], [1.0]] * 5)
    right = np.eye(2)[truth[:, 0].astype(int)]
    good, bad = (TWO.pictures(outputs, truth)["confusion"].astype(int) for outputs in (right, 1 - right))
    height, width, _ = good.shape
    corner = slice(height // 8, height // 3), slice(width // 2 - width // 8, width // 2)
    assert good[corner].mean() < bad[corner].mean() - 50
