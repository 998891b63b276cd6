"""scripts/benchmarks/contest.py: turns of several contestants become one row for each."""

import pytest

from benchmarks import contest


def test_contestants_are_compared_by_means_not_medians():
    cheap, dear = {"seconds": 1.0, "samples": 100}, {"seconds": 3.0, "samples": 100}
    answers = {"a": [cheap, cheap, cheap, dear], "b": [{"seconds": 1.0, "samples": 50}] * 4}
    rows = contest.compared(answers, "b")
    assert rows["a"]["seconds"] == pytest.approx(6 / 400) and rows["a"]["ratio"] == pytest.approx(0.75)
    assert rows["a"]["times_as_fast"] == pytest.approx(4 / 3) and rows["b"]["ratio"] == 1
    assert rows["a"]["spread"] == pytest.approx(1.0) and rows["b"]["spread"] == 0
