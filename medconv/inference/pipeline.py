"""Three stages at once: the next case is loaded while one is predicted and one is written.

Threads, not processes: unpacking, matrix products, the network and writing all release Python's lock (GIL).
A case is in memory from the start of its loading to the end of its writing: at most `workers + 2` cases.
"""

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")
Predicted = TypeVar("Predicted")


def stream(
    items: Iterable[Item],
    load: Callable[[Item], Loaded],
    predict: Callable[[Loaded], Predicted],
    write: Callable[[Item, Predicted], None],
    workers: int = 1,
) -> Iterator[tuple[Item, Exception | None]]:
    """Yields each item when it is finished, with its error or None; an error does not stop other items.

    Args:
        items: iterated in the caller's thread, as late as possible.
        load: runs in one of the loading threads.
        predict: runs in the caller's thread.
        write: runs in the writing thread.
        workers: items that are loaded at once.
    """
    writing: tuple[Item, Future[None]] | None = None
    with ThreadPoolExecutor(workers) as loaders, ThreadPoolExecutor(1) as writer:
        try:
            for item, loaded in _loaded(items, load, loaders, workers):
                predicted, error = _attempt(predict, loaded)
                _clear_frames(error)
                # They reference the case, which should not stay in memory.
                del loaded
                # The previous item was written while this one was predicted.
                if writing is not None:
                    yield writing[0], _error(writing[1])
                    writing = None
                if error is None:
                    writing = item, writer.submit(write, item, predicted)  # type: ignore[arg-type]
                else:
                    yield item, error
                del predicted
            if writing is not None:
                yield writing[0], _error(writing[1])
        except BaseException:
            loaders.shutdown(wait=False, cancel_futures=True)
            raise


def _loaded(
    items: Iterable[Item], load: Callable[[Item], Loaded], loaders: ThreadPoolExecutor, workers: int
) -> Iterator[tuple[Item, Future[Loaded]]]:
    """Items that are loaded, in order, while the next `workers` items are being loaded."""
    upcoming = iter(items)
    loading: deque[tuple[Item, Future[Loaded]]] = deque()

    def refill(number: int) -> None:
        for item in islice(upcoming, number - len(loading)):
            loading.append((item, loaders.submit(load, item)))

    refill(workers)
    while loading:
        wait([loading[0][1]])
        # One more than workers: the first one is loaded already.
        refill(workers + 1)
        yield loading.popleft()


def _attempt(
    predict: Callable[[Loaded], Predicted], loaded: Future[Loaded]
) -> tuple[Predicted | None, Exception | None]:
    try:
        return predict(loaded.result()), None
    except Exception as error:
        return None, error


def _error(future: Future[None]) -> Exception | None:
    error = future.exception()
    assert error is None or isinstance(error, Exception)
    _clear_frames(error)
    return error


def _clear_frames(error: BaseException | None) -> None:
    """Free the case, which an error's frames reference; the traceback can still be printed."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
