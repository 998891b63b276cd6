"""What `summary.json` holds: its keys, the scores of the best checkpoint, and how the run ended."""

from collections.abc import Mapping
from typing import Any

from medconv.targets import Targets
from medconv.utils import cluster
from medconv.utils.signals import RunInterrupted

_KEYS = (
    "val/dice",
    "val/dice_per_class",
    "steps",
    "wall_seconds",
    "samples_per_second",
    "data_wait_share",
    "step_shares",
    "verdict",
    "peak_memory_bytes",
    "status",
    "versions",
    "hardware",
    "git_commit",
    "command",
)


def empty() -> dict[str, Any]:
    """All keys that other programs rely on, with null as value."""
    return dict.fromkeys(_KEYS)


def status_after(error: BaseException) -> str:
    """The status of a run that ended with this exception."""
    if isinstance(error, (RunInterrupted, cluster.PeerLostError)):
        return "interrupted" if isinstance(error, RunInterrupted) and error.by_hand else "preempted"
    return "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"


def scores(record: Mapping[str, Any]) -> dict[str, Any]:
    """Scores as they are logged, and the row of each case. Args: record: a checkpoint's `medconv`."""
    rows = record["validation"]
    scores = Targets.from_plain(record["targets"]).summary(rows)
    return {**{f"val/{name}": value for name, value in scores.items()}, "val/cases": rows}


def is_valid(content: Any) -> bool:
    """Whether scores are numbers, and all cases have the same classes; other programs rely on both."""
    if not isinstance(content, dict):
        return False
    keys = ("val/cases", "skipped_cases")
    cases, skipped = ({} if content.get(key) is None else content[key] for key in keys)
    if not isinstance(cases, dict) or not isinstance(skipped, dict):
        return False
    if not all(isinstance(row, dict) for row in cases.values()):
        return False
    if len({tuple(row) for row in cases.values()}) > 1:
        return False
    values = [value for row in cases.values() for value in row.values()]
    image_level_values = [item for value in values if isinstance(value, list) for item in value]
    dice = [value for value in values if not isinstance(value, list)]
    numbers = [content.get("val/dice"), *image_level_values, *dice]
    return all(number is None or type(number) in (int, float) for number in numbers)
