"""Results of a sweep: a table, best first, and `sweep.csv`."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv.sweeps.job import Job, settings_of, value, varied
from medconv.targets import monitor
from medconv.utils.atomic_io import write_text
from medconv.utils.logging import shown

CSV = "sweep.csv"
_FROM_SUMMARY = ("steps", "wall_seconds", "samples_per_second")


def ranked(jobs: Sequence[Job]) -> list[Job]:
    """Best first, by the monitored metric; jobs without a score last."""

    def quality(job: Job) -> float:
        summary = job.folder.summary()
        score = _score(summary)
        return -math.inf if score is None else monitor.metric_of_summary(summary).quality(score)

    return sorted(jobs, key=quality, reverse=True)


def text(jobs: Sequence[Job]) -> str:
    """One line per job: score, folder, the overrides in which it differs, and why it failed."""
    keys = varied(jobs)
    lines = ["sweep, best first"]
    for job in ranked(jobs):
        own = settings_of(job, keys) or " ".join(job.overrides)
        failed = f"  {job.status}, {job.reason}" if job.reason else ""
        score = score_text(_score(job.folder.summary()))
        lines.append(f"  {score}  {job.folder.path}  {own}{failed}")
    return shown("\n".join(lines))


def score_text(score: float | None) -> str:
    return "  -   " if score is None else f"{score:.4f}"


def write(home: Path, jobs: Sequence[Job]) -> Path:
    """Write a row per job: the overrides that differ, then the results. Returns: the file."""
    keys = varied(jobs)
    summaries = [(job, job.folder.summary()) for job in ranked(jobs)]
    scored = [monitor.metric_of_summary(summary).name for _, summary in summaries if summary.get("score")]
    names = list(dict.fromkeys(scored)) or [monitor.DICE.name]
    classes = list(dict.fromkeys(name for _, summary in summaries for name in _per_class(summary)))
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    of_classes = [f"val/dice/{name}" for name in classes]
    writer.writerow([*keys, *names, *of_classes, *_FROM_SUMMARY, "status", "reason", "folder"])
    for job, summary in summaries:
        scores = [*map(summary.get, names), *map(_per_class(summary).get, classes)]
        row = [*(value(job, k) for k in keys), *scores, *map(summary.get, _FROM_SUMMARY)]
        writer.writerow([*row, job.status, job.reason, job.folder.path])
    write_text(home / CSV, out.getvalue())
    return home / CSV


def _score(summary: Mapping[str, Any]) -> float | None:
    return summary.get(monitor.metric_of_summary(summary).name)


def _per_class(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    return summary.get("val/dice_per_class") or {}
