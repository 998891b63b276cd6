"""What came of a sweep: a table, best first, and `sweep.csv`."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medconv.atomic import write_text
from medconv.commands import shown
from medconv.jobs import Job, value, varied

CSV = "sweep.csv"
_FROM_SUMMARY = ("steps", "wall_seconds", "samples_per_second")


def ranked(jobs: Sequence[Job]) -> list[Job]:
    """Best first, by the validation Dice; those without one last."""
    scores = {id(job): job.folder.summary().get("val/dice") for job in jobs}
    return sorted(jobs, key=lambda job: -1 if (score := scores[id(job)]) is None else score, reverse=True)


def text(jobs: Sequence[Job]) -> str:
    """One line per job: Dice, folder, what it has for itself, and why it failed."""
    keys = varied(jobs)
    lines = ["sweep, best first"]
    for job in ranked(jobs):
        dice = job.folder.summary().get("val/dice")
        own = [f"{key}={value(job, key)}" for key in keys if value(job, key)] or list(job.overrides)
        failed = f"  {job.status}, {job.reason}" if job.reason else ""
        lines.append(f"  {'  -   ' if dice is None else f'{dice:.4f}'}  {job.folder.path}  {' '.join(own)}{failed}")
    return shown("\n".join(lines))


def write(home: Path, jobs: Sequence[Job]) -> Path:
    """A row per job: the overrides that differ, then what came of it. Returns: the file."""
    keys = varied(jobs)
    summaries = [(job, job.folder.summary()) for job in ranked(jobs)]
    classes = list(dict.fromkeys(name for _, summary in summaries for name in summary.get("val/dice_per_class") or {}))
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    header = [*keys, "val/dice", *(f"val/dice/{name}" for name in classes), *_FROM_SUMMARY, "status", "reason", "folder"]
    writer.writerow(header)
    for job, summary in summaries:
        per_class: dict[str, Any] = summary.get("val/dice_per_class") or {}
        scores = [summary.get("val/dice"), *(per_class.get(name) for name in classes)]
        rest = [summary.get(name) for name in _FROM_SUMMARY]
        writer.writerow([*(value(job, k) for k in keys), *scores, *rest, job.status, job.reason, job.folder.path])
    write_text(home / CSV, out.getvalue())
    return home / CSV
