"""The logs of a run, `metrics.csv` and TensorBoard's files, and their sizes at each checkpoint, to which a
resumed run cuts them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from medconv.utils.atomic_io import replacing

METRICS_CSV = "metrics.csv"
TENSORBOARD = "tensorboard"
_EVENTS = "events.out.tfevents.*"


def measure_logs(folder: Path) -> dict[str, int]:
    """Current sizes: rows of `metrics.csv` with its header, and bytes of each TensorBoard file."""
    table = folder / METRICS_CSV
    sizes = {METRICS_CSV: table.read_bytes().count(b"\n") if table.is_file() else 0}
    for path in _events(folder):
        sizes[str(path.relative_to(folder))] = path.stat().st_size
    return sizes


def rewind_logs(folder: Path, sizes: Mapping[str, int]) -> None:
    """Cut the logs to the sizes from `measure_logs`; files without a size are removed."""
    table = folder / METRICS_CSV
    if table.is_file():
        rows = table.read_bytes().splitlines(keepends=True)
        # To rows, not to bytes: a new column rewrites earlier rows
        kept = rows[: sizes.get(METRICS_CSV, 0)]
        if not kept:
            table.unlink()
        elif len(kept) < len(rows):
            with replacing(table) as partial:
                partial.write_bytes(b"".join(kept))
    for path in _events(folder):
        size = sizes.get(str(path.relative_to(folder)))
        if size is None:
            path.unlink()
        elif size < path.stat().st_size:
            with path.open("r+b") as file:
                file.truncate(size)


def _events(folder: Path) -> Iterator[Path]:
    """TensorBoard files of this run."""
    return (path for path in sorted((folder / TENSORBOARD).rglob(_EVENTS)) if path.is_file())
