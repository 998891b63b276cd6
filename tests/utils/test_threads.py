"""medconv/utils/progress.py: results in order, as many threads as asked for, and the end at the first error."""

import threading

import pytest
from helpers.waiting import PATIENCE_S

from medconv.utils.progress import each


def test_each_runs_as_many_threads_as_there_are_workers():
    """Each thread holds one case, so this also limits the memory."""
    running, most, lock, all_run = 0, 0, threading.Lock(), threading.Barrier(3)

    def work(item):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        all_run.wait(PATIENCE_S)
        with lock:
            running -= 1
        return -item

    assert list(each(work, range(21), 3, "work")) == [-n for n in range(21)]
    assert most == 3


def test_the_first_error_ends_the_work():
    """To do all items would take 100 seconds; the error is seen long before."""
    done, items = [], range(20_000)

    def work(item):
        if item == 1:
            raise ValueError("of item 1")
        threading.Event().wait(0.01)
        done.append(item)

    with pytest.raises(ValueError, match="of item 1"):
        list(each(work, items, 2, "work"))
    assert len(done) < len(items) - 1
