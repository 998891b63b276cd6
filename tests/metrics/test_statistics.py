"""medconv/metrics/statistics.py: against scipy and by hand, and with few or no values."""

import numpy as np
import pytest
from scipy import stats

from medconv.metrics.statistics import _resamples, describe, holm, interval, interval_of_column_means, paired


def test_describe_skips_undefined_values():
    summary = describe([0.5, None, 0.9, 0.7])
    assert (summary["n"], summary["mean"], summary["median"]) == (3, pytest.approx(0.7), pytest.approx(0.7))
    assert summary["sd"] == pytest.approx(0.2)  # of a sample: n - 1
    assert 0.5 <= summary["low"] < 0.7 < summary["high"] <= 0.9


def test_describe_without_a_spread_has_no_interval():
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
def test_interval_equals_the_percentile_bootstrap_of_scipy(n):
    values = np.random.default_rng(1).gamma(2, size=n)
    expected = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=9999, batch=500
    ).confidence_interval
    assert interval(values) == pytest.approx((expected.low, expected.high), rel=0.02)
    assert interval(values) == interval(values)


def test_the_interval_of_column_means_is_of_the_mean_beside_it():
    rng = np.random.default_rng(0)
    values = rng.normal(0.8, 0.1, (30, 3))
    assert interval_of_column_means(values) == pytest.approx(interval(values.mean(1)))
    rare = np.tile([0.9, np.nan], (10, 1))  # the second class is in one case
    rare[3, 1] = 0.1
    # A resample without that case has the mean of the first class alone
    assert interval_of_column_means(rare) == pytest.approx((np.mean([0.9, 0.1]), 0.9))


@pytest.mark.parametrize("n", [2, 1200])
def test_there_are_as_many_resamples_however_many_cases(n):
    assert sum(map(len, _resamples(n))) == 10_000


def test_paired_uses_the_cases_that_both_have():
    rng = np.random.default_rng(3)
    a = rng.normal(0.80, 0.05, 20)
    b = a - rng.normal(0.02, 0.03, 20)
    row = paired([*a, None, 0.5], [*b, 0.1, None])
    assert (row["n"], row["difference"]) == (20, pytest.approx(np.mean(a - b)))
    assert (row["mean"], row["mean_compare"]) == (pytest.approx(a.mean()), pytest.approx(b.mean()))
    assert row["p"] == pytest.approx(stats.wilcoxon(a - b).pvalue)
    assert (row["low"], row["high"]) == interval(a - b)
    assert paired([*b], [*a])["difference"] == pytest.approx(-row["difference"])


def test_the_p_of_five_cases_is_exact():
    """Five cases, all better: the two-sided p is 2 / 2^5."""
    assert paired([0.9, 0.8, 0.7, 0.6, 0.5], [0.8, 0.6, 0.4, 0.2, 0.0])["p"] == pytest.approx(0.0625)


def test_differences_that_are_equal_but_for_rounding_have_one_rank():
    """Scores such as those of few lesions; 0.8 - 0.6 and 0.4 - 0.2 differ in their last bit."""
    a, b = [0.2, 0.4, 0.4, 0.4, 0.2, 0.8, 0.2, 0.8], [0.0, 0.2, 0.2, 0.4, 0.2, 0.6, 0.4, 1.0]
    in_fifths = np.round(5 * (np.array(a) - np.array(b)))
    expected = stats.wilcoxon(in_fifths[in_fifths != 0]).pvalue
    assert paired(a, b)["p"] == pytest.approx(expected)
    assert paired([1e6 * value for value in a], [1e6 * value for value in b])["p"] == pytest.approx(expected)


def test_paired_without_a_difference_or_a_case_has_no_effect():
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


def test_holm_corrects_as_by_hand():
    """By hand: 0.01 x 4, then 0.02 x 3, 0.03 x 2 kept at 0.06, 0.9."""
    corrected = holm({"a": 0.02, "b": 0.9, "c": 0.01, "d": 0.03, "e": None})
    assert corrected == {
        "a": pytest.approx(0.06),
        "b": pytest.approx(0.9),
        "c": pytest.approx(0.04),
        "d": pytest.approx(0.06),
        "e": None,
    }
    assert holm({"a": 0.8, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}
