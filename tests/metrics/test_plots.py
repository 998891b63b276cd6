"""medconv/metrics/plots.py: plots for all target types, without cases and with unusual names."""

import warnings

import numpy as np
import pytest

from medconv.metrics import plots
from medconv.targets.image_level import ImageLevelTargets
from tests.metrics.test_image_level import FINDINGS, FOUR, NUMBERS, TWO, drawn

ODD = ImageLevelTargets(
    "multiclass", ("_hidden", "$\\frac{", "two\nlines and very much longer than any name", "肺炎")
)


@pytest.mark.parametrize(
    "image_targets", [TWO, FOUR, FINDINGS, NUMBERS, ODD], ids=lambda o: f"{len(o.names)} {o.kind}"
)
@pytest.mark.parametrize("cases", [0, 1, 50])
def test_all_outcomes_have_pictures(image_targets: ImageLevelTargets, cases: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = plots.pictures(image_targets, *drawn(image_targets, cases))
    assert set(found) == ({"scatter"} if image_targets is NUMBERS else {"confusion", "roc", "reliability"})
    for picture in found.values():
        assert picture.dtype == np.uint8 and picture.shape[2] == 3 and picture.flags.c_contiguous
        assert picture.std() > 5


def test_many_names_stay_readable_in_size() -> None:
    many = ImageLevelTargets("multiclass", tuple(f"class {i}" for i in range(60)))
    for picture in plots.pictures(many, *drawn(many, 100)).values():
        assert max(picture.shape) <= 1500


def test_answers_that_are_no_numbers() -> None:
    for image_targets in (TWO, FINDINGS, NUMBERS):
        outputs, truth = drawn(image_targets, 5)
        assert plots.pictures(image_targets, outputs * np.nan, truth)


def test_steps_of_a_curve() -> None:
    """Scores 0.9 (with), 0.5 (one with and one without), 0.1 (without): two ways up, the middle one a
    slope.
    """
    false, true = plots._steps(np.array([0.1, 0.9, 0.5, 0.5]), np.array([False, True, True, False]))
    assert false.tolist() == [0, 0, 0.5, 1] and true.tolist() == [0, 0.5, 1, 1]


def test_a_better_network_is_darker_on_the_diagonal() -> None:
    truth = np.array([[0.0], [1.0]] * 5)
    right = np.eye(2)[truth[:, 0].astype(int)]
    good, bad = (plots.confusion(TWO, outputs, truth).astype(int) for outputs in (right, 1 - right))
    height, width, _ = good.shape
    corner = slice(height // 8, height // 3), slice(width // 2 - width // 8, width // 2)
    assert good[corner].mean() < bad[corner].mean() - 50
