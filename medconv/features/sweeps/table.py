"""Results of a sweep: a table, best first, and `sweep.csv`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv.features.sweeps.job import Job, settings_of, value, varied
from medconv.targets.scores import DICE, metric_of_summary
from medconv.utils.atomic_io import write_text
from medconv.utils.csv_cells import csv_text
from medconv.utils.logging import score_text, shown

CSV = "sweep.csv"
_SUMMARY_COLUMNS = ("steps", "wall_seconds", "samples_per_second")


def ranked(jobs: Sequence[Job]) -> list[Job]:
    """Best first, by the monitored metric; jobs without a score last."""

    def quality(job: Job) -> float:
        summary = job.folder.summary()
        score = _score(summary)
        if score is None:
            return -math.inf
        return metric_of_summary(summary).quality(score)

    return sorted(jobs, key=quality, reverse=True)


def text(jobs: Sequence[Job]) -> str:
    """One line per job: score, folder, the overrides in which it differs, and why it failed."""
    keys = varied(jobs)
    lines = ["sweep, best first"]
    for job in ranked(jobs):
        score = score_text(_score(job.folder.summary()))
        overrides = settings_of(job, keys) or " ".join(job.overrides)
        failure = f"  {job.status}, {job.reason}" if job.reason else ""
        lines.append(f"  {score}  {job.folder.path}  {overrides}{failure}")
    return shown("\n".join(lines))


def write(home: Path, jobs: Sequence[Job]) -> Path:
    """Write a row per job: the overrides that differ, then the results. Returns: the file."""
    keys = varied(jobs)
    ranked_jobs = ranked(jobs)
    summaries = [job.folder.summary() for job in ranked_jobs]
    metrics = _metric_names(summaries)
    classes = _class_names(summaries)
    columns = [*keys, *metrics]
    columns += [f"val/dice/{name}" for name in classes]
    columns += [*_SUMMARY_COLUMNS, "status", "reason", "folder"]
    rows: list[list[Any]] = [columns]
    for job, summary in zip(ranked_jobs, summaries, strict=True):
        dice = _dice_per_class(summary)
        row: list[Any] = [value(job, key) for key in keys]
        # Jobs with other targets lack some metrics or classes; their cells are empty.
        row += [summary.get(name) for name in metrics]
        row += [dice.get(name) for name in classes]
        row += [summary.get(name) for name in _SUMMARY_COLUMNS]
        row += [job.status, job.reason, str(job.folder.path)]
        rows.append(row)
    # The file is written at once, and never a part of it.
    write_text(home / CSV, csv_text(rows))
    return home / CSV


def _metric_names(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The monitored metrics, each once, in order."""
    names = []
    for summary in summaries:
        if summary.get("score"):
            names.append(metric_of_summary(summary).name)
    return list(dict.fromkeys(names)) or [DICE.name]


def _class_names(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Class names of all jobs, each once, in order."""
    names = [name for summary in summaries for name in _dice_per_class(summary)]
    return list(dict.fromkeys(names))


def _score(summary: Mapping[str, Any]) -> float | None:
    return summary.get(metric_of_summary(summary).name)


def _dice_per_class(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    return summary.get("val/dice_per_class") or {}
