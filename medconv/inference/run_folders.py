"""The checkpoints that the folder of a run stands for."""

import json
import re
from pathlib import Path

_NAMES = ("best.ckpt", "last.ckpt")  # the last one where nothing was validated
# Of the run itself and of further members. Not of any run in a folder: unrelated ones would be averaged.
_CHECKPOINTS = ("checkpoints", "members/*/checkpoints")
_MOVED_ASIDE = re.compile(r"\.\d{8}-\d{6}$")  # by run.resume=never


def checkpoints_of(path: Path) -> list[Path]:
    """The checkpoint to predict with of a run, and of each of its members; a file stands for itself.

    Raises:
        ValueError: the folder is not that of a run, or one has not been trained to its end.
    """
    if not path.is_dir():
        return [path]
    if not (path / "checkpoints").is_dir():
        raise ValueError(f"{path}: not the folder of a run, expected RUN or RUN/checkpoints/best.ckpt")
    found = []
    for pattern in _CHECKPOINTS:
        for checkpoints in sorted(path.glob(pattern)):
            run = checkpoints.parent
            files = [checkpoints / name for name in _NAMES if (checkpoints / name).is_file()]
            if _MOVED_ASIDE.search(run.name):
                continue
            _check_finished(run)
            if not files:
                raise ValueError(f"{run}: its training is not done (no checkpoint); train it to its end")
            found.append(files[0])
    return found


def _check_finished(run: Path) -> None:
    """Raises: ValueError: its summary says that it has not been trained to its end."""
    try:
        status = json.loads((run / "summary.json").read_text(encoding="utf-8")).get("status")
    except (OSError, ValueError, AttributeError):
        return  # of another program, which says nothing
    if status not in (None, "done"):
        raise ValueError(
            f"{run}: its training is not done (status: {status}); train it to its end, or name the "
            "checkpoints one by one"
        )
