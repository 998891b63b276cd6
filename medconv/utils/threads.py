"""Process many cases in threads, with a progress bar; stop as soon as one case fails.

Threads, not processes: the slow parts (decompression, matrix products, NumPy on volumes, writing) release
the GIL, and a process would first spend seconds on importing torch.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from threadpoolctl import threadpool_limits

from medconv.utils.progress import track

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(work: Callable[[Item], Result], items: Sequence[Item], workers: int, name: str) -> Iterator[Result]:
    """`work(item)` for every item, in order, with at most `workers` threads.

    Args:
        name: of the progress bar.

    Raises:
        Exception: any error of `work`; no further items are started then.
    """
    # One BLAS thread each: every worker does its own matrix products.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        # `map` cancels pending items once one has failed.
        results = pool.map(work, items)
        yield from track(results, name, len(items))
