"""Work on many cases at once: threads, a progress bar, and an end as soon as one case fails.

Threads, not processes: what takes time here (unpacking, matrix products, numpy on whole volumes, writing)
runs outside of Python's lock, and a process would first spend seconds on importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from threadpoolctl import threadpool_limits
from tqdm import tqdm

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(work: Callable[[Item], Result], items: Sequence[Item], workers: int, name: str) -> Iterator[Result]:
    """`work` of every item, in order; at most `workers` items are in work at once.

    Raises: what `work` raises, without beginning further items.
    """
    with (
        threadpool_limits(1, user_api="blas"),
        ThreadPoolExecutor(workers) as pool,
    ):  # each does its own matrix products
        results = pool.map(work, items)  # which cancels what has not begun once one has failed
        yield from tqdm(results, total=len(items), desc=name, unit="case", leave=False, disable=None)
