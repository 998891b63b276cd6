"""Results of a sweep: a table, best first, and `sweep.csv`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv.sweeps.job import Job, value, varied
from medconv.targets import monitor
from medconv.utils.atomic_io import write_text
from medconv.utils.logging import shown

CSV = "sweep.csv"
_FROM_SUMMARY = ("steps", "wall_seconds", "samples_per_second")


def ranked(jobs: Sequence[Job]) -> list[Job]:
    """Best first, by the monitored metric; jobs without a score last."""
    summaries = {id(job): job.folder.summary() for job in jobs}
    return sorted(jobs, key=lambda job: _quality(summaries[id(job)]), reverse=True)


def _quality(summary: Mapping[str, Any]) -> float:
    monitored = monitor.metric_of_summary(summary)
    score = summary.get(monitored.name)
    return -math.inf if score is None else monitored.quality(score)


def text(jobs: Sequence[Job]) -> str:
    """One line per job: score, folder, the overrides in which it differs, and why it failed."""
    keys = varied(jobs)
    lines = ["sweep, best first"]
    for job in ranked(jobs):
        summary = job.folder.summary()
        score = summary.get(monitor.metric_of_summary(summary).name)
        own = [f"{key}={value(job, key)}" for key in keys if value(job, key)] or list(job.overrides)
        failed = f"  {job.status}, {job.reason}" if job.reason else ""
        lines.append(
            f"  {'  -   ' if score is None else f'{score:.4f}'}  {job.folder.path}  {' '.join(own)}{failed}"
        )
    return shown("\n".join(lines))


def write(home: Path, jobs: Sequence[Job]) -> Path:
    """Write a row per job: the overrides that differ, then the results. Returns: the file."""
    keys = varied(jobs)
    summaries = [(job, job.folder.summary()) for job in ranked(jobs)]
    classes = list(
        dict.fromkeys(name for _, summary in summaries for name in summary.get("val/dice_per_class") or {})
    )
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    names = list(
        dict.fromkeys(
            monitor.metric_of_summary(summary).name for _, summary in summaries if summary.get("score")
        )
    )
    names = names or [monitor.DICE.name]
    header = [
        *keys,
        *names,
        *(f"val/dice/{name}" for name in classes),
        *_FROM_SUMMARY,
        "status",
        "reason",
        "folder",
    ]
    writer.writerow(header)
    for job, summary in summaries:
        per_class: dict[str, Any] = summary.get("val/dice_per_class") or {}
        scores = [*map(summary.get, names), *(per_class.get(name) for name in classes)]
        rest = [summary.get(name) for name in _FROM_SUMMARY]
        writer.writerow(
            [*(value(job, k) for k in keys), *scores, *rest, job.status, job.reason, job.folder.path]
        )
    write_text(home / CSV, out.getvalue())
    return home / CSV
