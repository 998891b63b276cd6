"""What `summary.json` holds: the scores of the best checkpoint, and what is not known yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medconv import metrics, scoring
from medconv.outcomes import Outcome
from medconv.tasks.whole import arrays


def scores(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a checkpoint's record, as they are logged, with the row of each case."""
    rows = record["validation"]
    if record.get("outcome") is not None:
        return {**_of_whole_images(Outcome.from_plain(record["outcome"]), rows), "val/cases": rows}
    per_class = metrics.mean_per_class(list(rows.values()))
    return {"val/dice": metrics.mean(per_class), "val/dice_per_class": per_class, "val/cases": rows}


def undefined() -> dict[str, Any]:
    keys = ("val/dice", "val/dice_per_class", "steps", "wall_seconds", "samples_per_second", "data_wait_share")
    return dict.fromkeys(
        (*keys, "step_shares", "verdict", "peak_memory_bytes", "status", "versions", "hardware", "git_commit", "command")
    )


def is_whole(content: Any) -> bool:
    """Whether what others rely on is as it was written: the scores, and the same classes in every case."""
    if not isinstance(content, dict):
        return False
    cases, skipped = ({} if content.get(key) is None else content[key] for key in ("val/cases", "skipped_cases"))
    if not isinstance(cases, dict) or not isinstance(skipped, dict):
        return False
    if not all(isinstance(row, dict) for row in cases.values()) or len({tuple(row) for row in cases.values()}) > 1:
        return False
    rows = [value for row in cases.values() for value in row.values()]
    of_whole = [value for row in rows if isinstance(row, list) for value in row]  # outputs and truth of whole images
    scores = [content.get("val/dice"), *of_whole, *(value for value in rows if not isinstance(value, list))]
    return all(score is None or type(score) in (int, float) for score in scores)


def _of_whole_images(outcome: Outcome, rows: dict[str, Any]) -> dict[str, Any]:
    """The scores over all cases, as they are logged."""
    if not rows:
        return {}
    return {f"val/{name}": value for name, value in scoring.measure(outcome, *arrays(rows)).items()}
