"""scripts/benchmarks/peers/training.py: a training's clock, and the snapshots that stop it."""

import pytest
from helpers.benchmarks_harness import ManualClock

from benchmarks.peers import training


def test_a_step_is_taken_if_half_of_it_fits_into_the_time():
    now = ManualClock()
    clock = training.Clock(10, now)
    clock.start()
    steps = []
    for step in (6.0, 2.0, 1.0, 1.0, 9.0):
        if not clock.fits():
            break
        now.wait(step)
        steps.append(step)
    assert steps == [6.0, 2.0, 1.0] + [1.0]  # 6 + 3 fit into 10, 10 + 0.5 do not


def test_the_clock_stops_while_snapshots_are_saved(tmp_path):
    now = ManualClock()
    job = training.Job("", "", "", "", str(tmp_path), [], ["a", "b"], 1, 10, [2, 3, 6], 1, 0, [])
    clock = training.Clock(job.seconds, now)
    snapshots, steps = training.Snapshots(job, clock), 0
    clock.start()
    while clock.fits():
        now.wait(0.4)
        steps += 1
        snapshots.after_step(steps, lambda path: (path.touch(), now.wait(50)))
    snapshots.finish(steps, lambda path: path.touch(), name="me")
    assert now() == pytest.approx(100 + 10 + 3 * 50) and clock.share == pytest.approx(1)
    kept = job.snapshots
    assert [s["cases"] for s in kept] == [["a"], ["a"], ["a"], ["a", "b"]]
    assert [s["seconds"] for s in kept] == pytest.approx([2, 3.2, 6, 10])
    assert [s["steps"] for s in kept] == [5, 8, 15, 25]


def test_a_slow_step_makes_one_snapshot(tmp_path):
    job = training.Job("", "", "", "", str(tmp_path), [], ["a"], 1, 10, [0.01, 0.02, 5.0], 1, 0, [])
    now = ManualClock()
    clock = training.Clock(job.seconds, now)
    snapshots = training.Snapshots(job, clock)
    clock.start()
    assert not snapshots.after_step(0, lambda path: path.touch())
    now.wait(0.05)
    assert snapshots.after_step(1, lambda path: path.touch())
    assert not snapshots.after_step(2, lambda path: path.touch())
