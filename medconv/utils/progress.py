"""Progress bars of all commands: on standard error, in a terminal alone; they vanish at the end."""

import sys
from collections.abc import Iterable, Iterator, Sized
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

Item = TypeVar("Item")


def in_terminal() -> bool:
    """Whether a bar can be drawn: standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and Console(stderr=True).is_interactive


def bar(*columns: ProgressColumn, **settings: Any) -> Progress:
    """A bar as wide as the terminal, begun by `with` or `start`. Messages meanwhile are printed above it."""
    above = {"redirect_stdout": sys.stdout.isatty()}  # else the output goes to a file, not to the terminal
    return _Progress(*columns, **{"console": Console(stderr=True), "transient": True, **above, **settings})


def track(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """The items, with a bar of how many are done.

    Args: what: is being done. total: needed of an iterator."""
    if not in_terminal():
        yield from items
        return
    number = len(items) if isinstance(items, Sized) else total
    with counting(what, number) as progress:
        for item in items:
            yield item
            progress.advance(progress.task_ids[0])


def counting(what: str, total: int | None) -> Progress:
    """A bar with one task, not begun yet, that shows nothing but in a terminal."""
    columns = (TextColumn(what, markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = bar(*columns, disable=not in_terminal())
    progress.add_task(what, total=total)
    return progress


class _Progress(Progress):
    def start(self) -> None:
        super().start()
        if not self.disable:
            self.console.show_cursor(True)  # a killed process could not show it again
