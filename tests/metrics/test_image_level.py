"""medconv/metrics/image_level.py: against slow second implementations and torchmetrics; undefined metrics."""

import numpy as np
import pytest
from helpers.image_level_outputs import FINDINGS, FOUR, NUMBERS, TWO, drawn
from reference import scores as reference

from medconv.metrics import bootstrap, image_level
from medconv.targets.image_level import ImageLevelTargets


@pytest.mark.parametrize("targets", [TWO, FINDINGS, NUMBERS], ids=lambda o: o.kind)
def test_without_cases_or_with_nan_metrics_are_undefined(targets: ImageLevelTargets) -> None:
    empty = np.zeros((0, targets.num_outputs)), np.zeros((0, targets.num_values))
    outputs, truth = drawn(targets, 4)
    for pair in (empty, (np.full_like(outputs, np.nan), truth)):
        assert set(image_level.measure(targets, *pair).values()) == {None}
        assert bootstrap.intervals(targets, *pair) == {}
        assert len(targets.errors(*pair)) == len(pair[1])
    assert bootstrap.intervals(targets, outputs[:1], truth[:1]) == {}


def test_metrics_per_class_equal_their_definitions() -> None:
    outputs, truth = drawn(FOUR, 40)
    rows = FOUR.per_name(outputs, truth)
    predicted = outputs.argmax(1)
    for index, name in enumerate(FOUR.names):
        member = truth[:, 0] == index
        assert rows[name]["cases"] == member.sum()
        assert rows[name]["auc"] == pytest.approx(reference.auc(outputs[:, index].tolist(), member.tolist()))
        assert rows[name]["sensitivity"] == pytest.approx((predicted[member] == index).mean())
        assert rows[name]["specificity"] == pytest.approx((predicted[~member] != index).mean())
        assert rows[name]["precision"] == pytest.approx(member[predicted == index].mean())
    pair = drawn(NUMBERS)
    mae = [row["mae"] for row in NUMBERS.per_name(*pair).values()]
    assert np.mean(mae) == pytest.approx(image_level.measure(NUMBERS, *pair)["mae"])


def test_the_error_of_a_case_is_its_distance_from_the_truth() -> None:
    outputs, truth = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), np.array([[1.0], [1.0], [0.0]])
    assert TWO.errors(outputs, truth) == pytest.approx([0.9, 0.2, 0.4])
    outputs, truth = np.array([[0.1, 0.8, 0.5]]), np.array([[0, 1, 1.0]])
    assert FINDINGS.errors(outputs, truth) == pytest.approx([0.5])
    spread = np.array([[0.0, 0.0], [2.0, 20.0]])
    assert NUMBERS.errors(spread + [1, 0], spread) == pytest.approx([0.5, 0.5])
