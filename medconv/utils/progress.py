"""Progress bars: on standard error in a terminal, or below a notebook's cell; they vanish at the end.

And work on many items in threads, with such a bar.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from threadpoolctl import threadpool_limits

from medconv.utils.hardware import num_cores

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_terminal() -> bool:
    """Whether a bar can be drawn: standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and Console(stderr=True).is_interactive


def in_notebook() -> bool:
    """Whether a bar can be drawn below a notebook's cell, which needs ipywidgets."""
    return Console(stderr=True).is_jupyter and find_spec("ipywidgets") is not None


def bar(*columns: ProgressColumn, **settings: Any) -> Progress:
    """A bar as wide as the terminal, not started yet. Messages meanwhile are printed above it.

    Args:
        settings: of rich's `Progress`.
    """
    defaults: dict[str, Any] = {
        "console": Console(stderr=True),
        "transient": True,
        # Standard output that goes to a file stays there, and not in the terminal above the bar.
        "redirect_stdout": sys.stdout.isatty(),
    }
    return _Progress(*columns, **{**defaults, **settings})


def track(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """The items, with a bar of how many are done.

    Args:
        description: what is being done, such as "training".
        total: the number of items, where they are an iterator.
    """
    if not (in_terminal() or in_notebook()):
        yield from items
        return
    count = len(items) if isinstance(items, Sized) else total
    with counting(description, count) as progress:
        for item in items:
            yield item
            progress.advance(progress.task_ids[0])


def each(
    work: Callable[[Item], Result], items: Sequence[Item], workers: int | None, name: str
) -> Iterator[Result]:
    """`work(item)` for every item, in order, with at most `workers` threads; stops as soon as one fails.

    Threads, not processes: the slow parts of preparing a case (decompression, matrix products, NumPy on
    volumes, writing) release the GIL, and a process would first spend seconds on importing torch.

    Args:
        workers: None: one per core, 8 or fewer.
        name: of the progress bar.

    Raises:
        Exception: any error of `work`; no further items are started then.
    """
    if workers is None:
        workers = min(8, num_cores())
    # One BLAS thread each: every worker does its own matrix products.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        # `map` cancels pending items once one has failed.
        results = pool.map(work, items)
        yield from track(results, name, len(items))


def counting(description: str, total: int | None) -> Progress:
    """A bar with one task, not started yet, that is drawn in a terminal or notebook alone."""
    progress = bar(
        TextColumn(description, markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        disable=not (in_terminal() or in_notebook()),
    )
    progress.add_task(description, total=total)
    return progress


class _Progress(Progress):
    def start(self) -> None:
        super().start()
        if not self.disable:
            # rich hides the cursor, and a process that is killed could not show it again.
            self.console.show_cursor(True)
