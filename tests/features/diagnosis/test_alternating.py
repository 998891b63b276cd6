"""medconv/features/diagnosis/alternating.py: variants take turns, and results hold ratios."""

import time

import pytest
import torch
from helpers.benchmarks_harness import ManualClock

from medconv.features.diagnosis import alternating
from medconv.features.diagnosis.alternating import alternate


def test_variants_alternate_and_get_ratios_to_the_reference():
    order = []
    clock = ManualClock()
    variants = {
        "a": lambda: (order.append("a"), clock.wait(2.0)),
        "b": lambda: (order.append("b"), clock.wait(6.0)),
    }
    timings = alternate(variants, "a", pairs=10, warm_up=1, clock=clock)
    assert order[:2] == ["a", "b"] and all(set(order[i : i + 2]) == {"a", "b"} for i in range(2, 22, 2))
    assert len({tuple(order[i : i + 2]) for i in range(2, 22, 2)}) == 2  # both orders occur
    assert timings["a"] == {"seconds": 2.0, "ratio": 1.0, "spread": 0.0}
    assert timings["b"] == {"seconds": 6.0, "ratio": 3.0, "spread": 0.0}


@pytest.mark.parametrize(("threads", "clock"), [(1, time.process_time), (2, time.perf_counter)])
def test_other_work_on_the_machine_does_not_count_for_one_thread(threads, clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert alternating.computing_clock() is clock


def test_several_calls_between_two_waits_give_the_seconds_of_one():
    clock = ManualClock()
    calls = []
    variants = {"a": lambda: (calls.append("a"), clock.wait(2.0))}
    assert alternate(variants, "a", pairs=3, warm_up=1, clock=clock, calls=10)["a"]["seconds"] == 2.0
    assert len(calls) == 31
