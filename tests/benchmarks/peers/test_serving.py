"""scripts/benchmarks/peers/serving.py: what a peer times."""

from helpers.benchmarks_harness import ManualClock

from benchmarks.peers import serving


def test_only_the_work_is_timed():
    clock, done = ManualClock(), []

    def work():
        clock.wait(10.0)
        done.append(1)
        return 3

    answer = serving._piecewise(work, lambda: clock.wait(50.0), 25.0, clock)
    assert answer == {"seconds": 30.0, "samples": 9} and len(done) == 3
    assert serving._piecewise(lambda: 2, None, 0.0, clock)["samples"] == 2
