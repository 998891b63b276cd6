"""A run's curves, `metrics.csv` and TensorBoard's files, cut back to where a checkpoint was made when a run
goes on.

So each step is there once: what a killed process wrote after its last checkpoint is written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from medconv.utils.atomic_io import replacing

_CSV, _TENSORBOARD, _EVENTS = "metrics.csv", "tensorboard", "events.out.tfevents.*"


def measure(folder: Path) -> dict[str, int]:
    """What there is by now: rows of `metrics.csv`, with its header, and bytes of each file of
    TensorBoard's.
    """
    table = folder / _CSV
    rows = table.read_bytes().count(b"\n") if table.is_file() else 0
    return {_CSV: rows, **{str(path.relative_to(folder)): path.stat().st_size for path in _events(folder)}}


def rewind(folder: Path, measured: Mapping[str, int]) -> None:
    """Cut the curves to what `measure` found; files that it did not find are removed."""
    table = folder / _CSV
    if table.is_file():
        rows = table.read_bytes().splitlines(keepends=True)
        kept = rows[: measured.get(_CSV, 0)]
        if not kept:
            table.unlink()
        elif len(kept) < len(
            rows
        ):  # a new column changes the bytes of the rows before it, but not how many they are
            with replacing(table) as partial:
                partial.write_bytes(b"".join(kept))
    for path in _events(folder):
        size = measured.get(str(path.relative_to(folder)))
        if size is None:
            path.unlink()
        elif size < path.stat().st_size:
            with path.open("r+b") as file:
                file.truncate(size)


def _events(folder: Path) -> Iterator[Path]:
    """Of this run alone: other runs may have their folders in it."""
    return (path for path in sorted((folder / _TENSORBOARD).rglob(_EVENTS)) if path.is_file())
