"""What contestants of the recipe benchmark share: their job, the clock of their budget, snapshots of their
weights.

Nothing here needs more than Python itself, as peers run where medconv is not installed.

A contestant is called three times, as `SCRIPT PART JOB`, with a JSON file of what `Job` has. `prepare` does
what its preprocessing and planning do and leaves it in `Job.prepared`, for all budgets. `train` trains for
the budget and leaves weights in `Job.folder`/snapshots and, once it is through, `training.json`: `about`
(itself), its `job`, `snapshots` (file, `seconds` and `steps` of each). `predict` leaves a label map of every
case that a snapshot is scored on, on the grid of the case's image, in
`Job.folder`/predictions/SNAPSHOT/CASE.nii.gz.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DONE = "training.json"


@dataclass(frozen=True)
class Job:
    """What one contestant has to do.

    Args:
        root: the dataset, and `raw` the same in nnU-Net's raw layout (for nnU-Net alone). splits: a
            splits_final.json of one split.
        train, val: case ids. score_cases: how many of `val`, from the first, a snapshot is scored on; the
            last one on all.
        seconds: of training. times: from its start, when to keep the weights; the end is not among them.
        threads: of torch. settings: the contestant's own.
    """

    root: str
    raw: str
    splits: str
    prepared: str
    folder: str
    train: list[str]
    val: list[str]
    score_cases: int
    seconds: float
    times: list[float]
    threads: int
    seed: int
    settings: list[str]

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @property
    def snapshots(self) -> list[dict[str, Any]]:
        """Of a training that is through: `file`, `seconds`, `steps`, and `cases` that it is scored on; the
        last one last.
        """
        snapshots = json.loads((Path(self.folder) / DONE).read_text())["snapshots"]
        return [
            {**s, "cases": self.val[: None if s is snapshots[-1] else self.score_cases]} for s in snapshots
        ]

    def predictions(self, snapshot: Mapping[str, Any]) -> Path:
        return Path(self.folder) / "predictions" / Path(snapshot["file"]).stem


class Clock:
    """Seconds of training: from `start` on, without what happens inside of `stopped`, which is in `left_out`.

    Args: budget: in seconds. now: tells seconds.
    """

    def __init__(self, budget: float, now: Callable[[], float] = time.monotonic) -> None:
        self.budget, self.left_out, self._begun, self._last = budget, 0.0, 0.0, 0.0
        self._now = now

    def start(self) -> None:
        self._begun = self._now()

    @property
    def seconds(self) -> float:
        return self._now() - self._begun - self.left_out

    @property
    def share(self) -> float:
        """Of the budget that is spent, from 0 to 1: what a schedule goes by, so that it ends with the
        budget.
        """
        return min(1.0, self.seconds / self.budget)

    def fits(self) -> bool:
        """Asked before every step: whether half of one as long as the last fits, so that on average it is
        the budget.
        """
        now = self.seconds
        step, self._last = now - self._last, now
        return now + step / 2 <= self.budget

    @contextmanager
    def stopped(self) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.left_out += self._now() - start


class Snapshots:
    """Keeps weights at the job's times and at the end; meanwhile the clock stands still.

    Args: ending: of the files' names.
    """

    def __init__(self, job: Job, clock: Clock, ending: str = ".pt") -> None:
        self.job, self.clock, self.ending = job, clock, ending
        self._due, self._kept = sorted(job.times), list[dict[str, Any]]()

    def after_step(self, steps: int, save: Callable[[Path], Any]) -> bool:
        """Where a time has come; one snapshot, where a step took longer than from one time to the next."""
        now = self.clock.seconds
        if not self._due or now < self._due[0]:
            return False
        self._due = [at for at in self._due if at > now]
        self._keep(steps, save)
        return True

    def finish(self, steps: int, save: Callable[[Path], Any], **about: Any) -> None:
        """The last one; says that training is through."""
        self._keep(steps, save)
        path = Path(self.job.folder) / DONE
        partial = path.with_suffix(".partial")
        content = {"about": about, "job": asdict(self.job), "snapshots": self._kept}
        partial.write_text(json.dumps(content, indent=1))
        partial.replace(path)

    def _keep(self, steps: int, save: Callable[[Path], Any]) -> None:
        seconds = self.clock.seconds
        path = Path(self.job.folder) / "snapshots" / f"{len(self._kept):02d}{self.ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.clock.stopped():
            save(path)
        self._kept.append({"file": str(path), "seconds": seconds, "steps": steps})


def missing(job: Job) -> Iterator[tuple[Path, Path, list[str]]]:
    """What is not predicted yet: a snapshot's file, the folder of its predictions, and the cases."""
    for snapshot in job.snapshots:
        folder = job.predictions(snapshot)
        cases = [case for case in snapshot["cases"] if not (folder / f"{case}.nii.gz").is_file()]
        if cases:
            folder.mkdir(parents=True, exist_ok=True)
            yield Path(snapshot["file"]), folder, cases


def main(about: str | None, **parts: Callable[[Job], Any]) -> None:
    """The contestant's command. Args: parts: `prepare`, `train` and `predict`."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("part", choices=list(parts))
    options.add_argument("job", type=Path)
    chosen = options.parse_args()
    job = Job.read(chosen.job)
    for folder in (job.prepared, job.folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
    parts[chosen.part](job)
