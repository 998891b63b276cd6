"""Stages that overlap, the number of items in memory, and errors."""

import gc
import threading
import weakref
from functools import partial
from typing import ClassVar

import pytest
from helpers.waiting import PATIENCE_S

from medconv.inference.predict import pipelined


class Big:
    """Counts its instances."""

    alive: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)


@pytest.mark.parametrize("workers", [1, 2])
def test_items_in_memory_are_bounded(workers):
    """All stages are full when item 0 is written, `workers` are loaded and one is predicted."""
    Big.alive.clear()
    gc.collect()
    highest, lock = 0, threading.Lock()
    loaded = [threading.Event() for _ in range(12)]

    def load(item):
        nonlocal highest
        content = Big()
        with lock:
            highest = max(highest, len(Big.alive))
        loaded[item].set()
        return content

    def predict(content):
        return content

    def write(item, predicted):
        if item == 0:  # while it is being written, the next ones are loaded
            assert loaded[workers + 1].wait(PATIENCE_S)

    assert list(pipelined(range(12), load, predict, write, workers)) == list(range(12))
    assert highest == workers + 2


def test_loading_prediction_and_writing_overlap():
    """Each stage waits for an earlier stage of the next item, which would never end one after the other."""
    began = {stage: [threading.Event() for _ in range(10)] for stage in ("load", "predict")}

    def wait(event):
        assert event.wait(PATIENCE_S)

    def load(item):
        began["load"][item].set()
        return item

    def predict(item):
        began["predict"][item].set()
        if item + 1 < 10:
            wait(began["load"][item + 1])  # the next item is loaded during this one's prediction
        return item

    def write(item, predicted):
        if item + 1 < 10:
            wait(began["predict"][item + 1])  # the next item is predicted during this one's writing

    assert list(pipelined(range(10), load, predict, write)) == list(range(10))


@pytest.mark.parametrize("stage", ["load", "predict", "write"])
def test_an_error_ends_the_stream(stage):
    def fail(name, item):
        if (name, item) == (stage, 2):
            raise OSError(name)
        return item

    finished = []
    stages = [partial(fail, name) for name in ("load", "predict")]
    with pytest.raises(OSError, match=stage):
        for item in pipelined(range(9), *stages, lambda _, item: fail("write", item) and None):
            finished.append(item)
    assert finished == list(range(len(finished)))
    assert len(finished) <= 2


def test_items_are_requested_as_late_as_possible():
    """Until then, another process may take them."""
    requested = []

    def items():
        for item in range(6):
            requested.append(item)
            yield item

    done = enumerate(pipelined(items(), lambda i: i, lambda i: i, lambda *_: None))
    assert max(len(requested) - number for number, _ in done) <= 3


def test_a_stop_does_not_wait_for_items_that_are_not_loaded_yet():
    loaded = []

    def load(item):
        loaded.append(item)
        return item

    def predict(item):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(pipelined(range(10), load, predict, lambda *_: None, workers=4))
    assert len(loaded) <= 5


def test_a_loaded_item_is_freed_once_it_is_predicted():
    Big.alive.clear()
    alive = []
    predicted_is_dropped = threading.Event()

    class Content(Big):
        def __del__(self) -> None:
            predicted_is_dropped.set()

    def write(item, predicted):
        predicted_is_dropped.wait(PATIENCE_S)
        alive.append(len(Big.alive))

    assert list(pipelined([0], lambda item: Content(), lambda loaded: "scores", write)) == [0]
    assert alive == [0]
