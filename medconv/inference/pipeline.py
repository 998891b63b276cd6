"""Three stages at once: the next case is loaded while one is predicted and one is written.

Threads, not processes: unpacking, matrix products, the network and writing all release Python's lock (GIL).
A case is in memory from the start of its loading to the end of its writing: at most `workers + 2` cases.
"""

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
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

    Args: items: iterated in the caller's thread, as late as possible. predict: runs in the caller's thread.
        workers: items that are loaded at once.
    """
    upcoming, loading = iter(items), deque[tuple[Item, Future[Loaded]]]()
    writing: tuple[Item, Future[None]] | None = None
    with ThreadPoolExecutor(workers) as loaders, ThreadPoolExecutor(1) as writer:

        def refill() -> None:
            while len(loading) < workers and (item := next(upcoming, None)) is not None:
                loading.append((item, loaders.submit(load, item)))

        try:
            refill()
            while loading:
                item, future = loading.popleft()
                wait([future])
                refill()
                predicted, error = _attempt(predict, future)
                _clear_frames(error)
                del future  # which references the case
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


def _attempt(
    predict: Callable[[Loaded], Predicted], future: Future[Loaded]
) -> tuple[Predicted | None, Exception | None]:
    try:
        return predict(future.result()), None
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
