"""medconv/metrics/bootstrap.py: intervals against a second bootstrap, their coverage, and comparisons."""

from typing import Any

import numpy as np
import pytest
from helpers.image_level_outputs import FINDINGS, FOUR, NUMBERS, TWO, drawn, slow_metrics

from medconv.metrics import bootstrap, image_level
from medconv.metrics.weighted import Columns
from medconv.targets.image_level import ImageLevelTargets


@pytest.mark.parametrize("targets", [FOUR, FINDINGS, NUMBERS], ids=lambda o: o.kind)
def test_intervals_equal_those_of_resampled_cases(targets: ImageLevelTargets) -> None:
    """A second bootstrap, sample by sample, of cases and not of counts."""
    outputs, truth = drawn(targets, 80)
    rng = np.random.default_rng(7)
    samples = [slow_metrics(targets, outputs[i], truth[i]) for i in rng.integers(80, size=(300, 80))]
    intervals = bootstrap.intervals(targets, outputs, truth)
    assert intervals == bootstrap.intervals(targets, outputs, truth)
    assert intervals != bootstrap.intervals(targets, outputs, truth, seed=1)
    values = image_level.measure(targets, outputs, truth)
    for name, (low, high) in intervals.items():
        expected = np.percentile([sample[name] for sample in samples], [2.5, 97.5])
        width = expected[1] - expected[0]
        assert (low, high) == pytest.approx(tuple(expected), abs=0.2 * width), name
        assert low <= values[name] <= high or name == "calibration_error"


def test_intervals_cover_the_true_value() -> None:
    """The AUC of two normal distributions one standard deviation apart is 0.760."""
    hits = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        truth = (np.arange(100) % 2).astype(float)
        score = 1 / (1 + np.exp(-rng.normal(truth, 1)))
        low, high = bootstrap.intervals(TWO, np.stack([1 - score, score], 1), truth[:, None], 200)["auc"]
        hits.append(low <= 0.7602 <= high)
    assert 0.88 <= np.mean(hits) <= 0.99


def test_a_thousand_samples_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, sizes = image_level.sample_columns, []

    def counted(*args: Any) -> Columns:
        sizes.append(len(args[-1]))
        return columns(*args)

    monkeypatch.setattr(image_level, "sample_columns", counted)
    bootstrap.intervals(TWO, *drawn(TWO, 624))
    assert sizes == [1, 1000]


def test_paired_compares_two_sets_of_predictions() -> None:
    outputs, truth = drawn(TWO, 150)
    decided, noise = TWO._predicted(outputs), np.random.default_rng(1).dirichlet([1, 1], 150)
    worse = decided * 0.2 + outputs * 0.1 + noise * 0.7
    rows, swapped = (
        bootstrap.paired(TWO, outputs, worse, truth),
        bootstrap.paired(TWO, worse, outputs, truth),
    )
    good, bad = image_level.measure(TWO, outputs, truth), image_level.measure(TWO, worse, truth)
    for name, row in rows.items():
        assert (row["value"], row["value_compare"]) == (good[name], bad[name])
        assert row["low"] <= row["difference"] <= row["high"] or name == "calibration_error"
        assert swapped[name]["difference"] == pytest.approx(-row["difference"])
        assert swapped[name]["low"] == pytest.approx(-row["high"])
    auc = rows["auc"]
    assert auc["difference"] > 0.1 and auc["p"] == pytest.approx(2 / 1001) and auc["low"] > 0
    same = bootstrap.paired(TWO, outputs, outputs, truth)["auc"]
    assert (same["difference"], same["low"], same["high"], same["p"]) == (0, 0, 0, 1)
    alone = bootstrap.paired(TWO, outputs[:3], worse[:3], np.zeros((3, 1)))["auc"]
    assert set(alone.values()) == {None}
