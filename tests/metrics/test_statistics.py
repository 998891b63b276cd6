"""medconv/metrics/statistics.py: against scipy and by hand, and where there is little to say."""

import numpy as np
import pytest
from scipy import stats

from medconv.metrics.statistics import describe, holm, interval, paired


def test_describe() -> None:
    found = describe([0.5, None, 0.9, 0.7])
    assert (found["n"], found["mean"], found["median"]) == (3, pytest.approx(0.7), pytest.approx(0.7))
    assert found["sd"] == pytest.approx(0.2)  # of a sample: n - 1
    assert 0.5 <= found["low"] < 0.7 < found["high"] <= 0.9


def test_describe_of_one_and_of_none() -> None:
    assert describe([0.5, None]) == {
        "n": 1,
        "mean": 0.5,
        "sd": None,
        "median": 0.5,
        "low": None,
        "high": None,
    }
    assert describe([None]) == {"n": 0, "mean": None, "sd": None, "median": None, "low": None, "high": None}


@pytest.mark.parametrize("n", [5, 40, 1200])
def test_interval_is_scipys_percentile_bootstrap(n: int) -> None:
    values = np.random.default_rng(1).gamma(2, size=n)
    theirs = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=9999, batch=500
    ).confidence_interval
    assert interval(values) == pytest.approx((theirs.low, theirs.high), rel=0.02)
    assert interval(values) == interval(values)


def test_interval_covers_the_mean_95_times_in_100() -> None:
    rng = np.random.default_rng(2)
    hits = [low <= 2 <= high for low, high in (interval(rng.normal(2, 1, 30)) for _ in range(300))]
    assert 0.89 <= np.mean(hits) <= 0.98


def test_paired_by_the_test_and_over_cases_that_both_have() -> None:
    rng = np.random.default_rng(3)
    a = rng.normal(0.80, 0.05, 20)
    b = a - rng.normal(0.02, 0.03, 20)
    found = paired([*a, None, 0.5], [*b, 0.1, None])
    assert (found["n"], found["difference"]) == (20, pytest.approx(np.mean(a - b)))
    assert (found["mean"], found["mean_compare"]) == (pytest.approx(a.mean()), pytest.approx(b.mean()))
    assert found["p"] == pytest.approx(stats.wilcoxon(a - b).pvalue)
    assert (found["low"], found["high"]) == interval(a - b)
    assert paired([*b], [*a])["difference"] == pytest.approx(-found["difference"])


def test_paired_exact_value() -> None:
    """Five cases, all better: the two-sided p is 2 / 2^5."""
    assert paired([0.9, 0.8, 0.7, 0.6, 0.5], [0.8, 0.6, 0.4, 0.2, 0.0])["p"] == pytest.approx(0.0625)


def test_paired_without_a_difference_or_a_case() -> None:
    same = [0.1 + 0.2, 0.5]
    assert paired(same, [0.3, 0.5]) == {
        "n": 2,
        "mean": 0.4,
        "mean_compare": 0.4,
        "difference": 0,
        "low": 0,
        "high": 0,
        "p": 1.0,
    }
    assert paired([None], [1.0]) == {
        "n": 0,
        **dict.fromkeys(("mean", "mean_compare", "difference", "low", "high", "p")),
    }


def test_holm() -> None:
    """By hand: 0.01 x 4, then 0.02 x 3, 0.03 x 2 kept at 0.06, 0.9."""
    found = holm({"a": 0.02, "b": 0.9, "c": 0.01, "d": 0.03, "e": None})
    assert found == {
        "a": pytest.approx(0.06),
        "b": pytest.approx(0.9),
        "c": pytest.approx(0.04),
        "d": pytest.approx(0.06),
        "e": None,
    }
    assert holm({"a": 0.8, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}
