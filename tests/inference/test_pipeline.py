"""medconv/inference/pipeline.py: stages that overlap, how many items are there at once, and errors."""

import gc
import threading
import time
import weakref
from itertools import count
from typing import ClassVar

import pytest

from medconv.inference.pipeline import stream


class Big:
    """Something of which we count how many there are."""

    alive: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("slow", ["load", "predict", "write", None])
def test_items_in_memory_are_bounded(workers: int, slow: str | None) -> None:
    """One in each stage, whichever is the slow one; and none is kept by an error."""
    Big.alive.clear()
    gc.collect()
    most, lock, numbers = 0, threading.Lock(), count()

    def load(item: int) -> Big:
        nonlocal most
        content = Big()
        with lock:
            most = max(most, len(Big.alive))
        time.sleep(0.02 if slow == "load" else 0.001)
        return content

    def predict(loaded: Big) -> Big:
        time.sleep(0.02 if slow == "predict" else 0.001)
        if next(numbers) % 4 == 1:
            raise ValueError("an error holds its frames")
        return loaded

    def write(item: int, predicted: Big) -> None:
        time.sleep(0.02 if slow == "write" else 0.001)

    done = [item for item, _ in stream(range(12), load, predict, write, workers)]
    assert sorted(done) == list(range(12))
    assert 2 <= most <= workers + 2


def test_the_stages_overlap() -> None:
    """Three times 10 items of 20 ms each take little more than 10 times 20 ms."""
    begin = time.perf_counter()
    for _, error in stream(
        range(10), lambda i: time.sleep(0.02), lambda _: time.sleep(0.02), lambda i, _: time.sleep(0.02)
    ):
        assert error is None
    assert time.perf_counter() - begin < 0.4  # one after the other: 0.6


def test_an_error_ends_its_item_alone() -> None:
    def load(item: int) -> int:
        return 1 // (item != 1) + item - 1

    def predict(item: int) -> int:
        if item == 2:
            raise ValueError("two")
        return item

    def write(item: int, predicted: int) -> None:
        assert item == predicted
        if item == 3:
            raise OSError("three")

    found = {item: type(error) for item, error in stream(range(5), load, predict, write)}
    assert found == {0: type(None), 1: ZeroDivisionError, 2: ValueError, 3: OSError, 4: type(None)}


def test_items_are_taken_as_late_as_they_can_be() -> None:
    """Another process may do them instead."""
    taken: list[int] = []

    def items():
        for item in range(6):
            taken.append(item)
            yield item

    ahead = [len(taken) - i for i, _ in enumerate(stream(items(), lambda i: i, lambda i: i, lambda *_: None))]
    assert max(ahead) <= 3


def test_a_stop_does_not_wait_for_what_has_not_begun() -> None:
    loaded = []

    def load(item: int) -> int:
        time.sleep(0.05)
        loaded.append(item)
        return item

    def predict(item: int) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(stream(range(10), load, predict, lambda *_: None, workers=4))
    assert len(loaded) <= 5


def test_what_was_loaded_goes_once_it_is_predicted() -> None:
    Big.alive.clear()
    left = []

    def write(item: int, predicted: str) -> None:
        time.sleep(0.05)
        left.append(len(Big.alive))

    assert list(stream([0], lambda item: Big(), lambda loaded: "scores", write)) == [(0, None)]
    assert left == [0]
