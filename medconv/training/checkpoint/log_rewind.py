"""Cuts `metrics.csv` and TensorBoard's files back to the time of a checkpoint when a run resumes.

So each step is logged once: what a killed process logged after its last checkpoint is logged again.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from medconv.utils.atomic_io import replacing

_CSV = "metrics.csv"
_TENSORBOARD = "tensorboard"
_EVENTS = "events.out.tfevents.*"


def measure(folder: Path) -> dict[str, int]:
    """Current sizes: rows of `metrics.csv` with its header, and bytes of each TensorBoard file."""
    table = folder / _CSV
    sizes = {_CSV: table.read_bytes().count(b"\n") if table.is_file() else 0}
    for path in _events(folder):
        sizes[str(path.relative_to(folder))] = path.stat().st_size
    return sizes


def rewind(folder: Path, measured: Mapping[str, int]) -> None:
    """Cut the logs to the sizes from `measure`; files without a size are removed."""
    _cut_table(folder / _CSV, measured.get(_CSV, 0))
    for path in _events(folder):
        size = measured.get(str(path.relative_to(folder)))
        if size is None:
            path.unlink()
        elif size < path.stat().st_size:
            with path.open("r+b") as file:
                file.truncate(size)


def _cut_table(table: Path, num_rows: int) -> None:
    """To rows, not to bytes: a new column rewrites earlier rows."""
    if not table.is_file():
        return
    rows = table.read_bytes().splitlines(keepends=True)
    kept = rows[:num_rows]
    if not kept:
        table.unlink()
    elif len(kept) < len(rows):
        with replacing(table) as partial:
            partial.write_bytes(b"".join(kept))


def _events(folder: Path) -> Iterator[Path]:
    """TensorBoard files of this run."""
    return (path for path in sorted((folder / _TENSORBOARD).rglob(_EVENTS)) if path.is_file())
