"""One job of a sweep: its overrides, its folder, its command, and how it ended."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from medconv.training.report import OF_A_SWEEP
from medconv.training.run_dir import RunDir, is_rank_zero, short_hash
from medconv.utils.atomic_io import write_text
from medconv.utils.logging import message, shown

_NOT_OF_THE_RUN = ("sweep", "run.dry_run")  # overrides that say nothing of what is trained
_SAME_SWEEP = ("run.dry_run", "data.fold", "hydra.sweeper.n_trials", "hydra.sweeper.n_jobs", "hydra/launcher")


@dataclass
class Job:
    """One config of a sweep.

    Args: flags: where its config comes from, such as `--config-dir`. code: its exit code. config: a hash of
    what is trained.
    """

    overrides: tuple[str, ...]
    flags: tuple[str, ...]
    home: Path
    code: int | None = None
    config: str = ""

    @classmethod
    def of(cls, composed: DictConfig, settings: Any) -> Job:
        """From a composed config and Hydra's settings."""
        options = {"command-line": "--config-dir", "main": "--config-path"}
        sources = [
            (options[s.provider], s.path) for s in settings.runtime.config_sources if s.provider in options
        ]
        pairs = [*sources, ("--config-name", settings.job.config_name)]
        searched = [o for o in settings.overrides.hydra if key(o) == "hydra.searchpath"]
        flags = (*(flag for pair in pairs for flag in pair), *searched)
        overrides = tuple(str(o) for o in settings.overrides.task if key(o) not in _NOT_OF_THE_RUN)
        content: Any = OmegaConf.to_container(composed, resolve=False)
        trained = short_hash({k: v for k, v in content.items() if k not in ("run", "hydra")})
        return cls(overrides, flags, home(composed), config=trained)

    @property
    def folder(self) -> RunDir:
        """The same for the same overrides in any order, so that the same sweep finds its runs again."""
        return RunDir(self.home / short_hash(sorted(self.overrides)))

    @property
    def arguments(self) -> list[str]:
        """Of `medconv train`; a config of the user's own may say that it is a sweep, and its jobs are
        none.
        """
        run_dir = QuotedString(str(self.folder.path), Quote.single).with_quotes()
        return [*self.flags, "hydra.mode=RUN", *self.overrides, f"run.dir={run_dir}"]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "medconv.cli", "train", *self.arguments]

    def begin(self) -> None:
        """What an earlier attempt said of its end holds no longer."""
        self.code = None
        _error_file(self.folder.path).unlink(missing_ok=True)

    def note(self, reason: str) -> None:
        """Why it failed, for the table."""
        _note(self.folder.path, reason)

    @property
    def noted(self) -> bool:
        """Whether it left word of why it failed. A job that was told to stop leaves none."""
        return _error_file(self.folder.path).is_file()

    @property
    def status(self) -> str:
        """`done`, or how it ended otherwise."""
        found = str(self.folder.summary().get("status") or "not begun")
        if self.code == 0:
            return "done"
        return "failed" if self.code is not None and found in ("done", "running", "not begun") else found

    @property
    def reason(self) -> str:
        """In one line why it failed; empty where it did not."""
        if not self.code:
            return ""
        try:
            said = _error_file(self.folder.path).read_text(encoding="utf-8").splitlines()[0]
        except (OSError, UnicodeDecodeError, IndexError):
            said = ""
        end = f"exit code {self.code}" if self.code > 0 else f"killed by {signal.Signals(-self.code).name}"
        return f"{end}: {said}" if said else end


def home(composed: DictConfig) -> Path:
    """`run.dir`, `runs/<run.name>`, or a name that the same command line finds again, whichever folds it
    asks for.
    """
    if composed.run.dir:
        return Path(composed.run.dir)
    given = [a for a in sys.argv[1:] if not a.startswith("-") and not key(a).startswith("hydra.launcher.")]
    arguments = sorted(a for a in given if key(a) not in _SAME_SWEEP)
    return Path("runs") / (composed.run.name or f"sweep-{short_hash(arguments)}")


def note_failure(composed: DictConfig, error: BaseException) -> None:
    """In a job of a sweep: leave word of what went wrong in its folder, for the table."""
    if OF_A_SWEEP in os.environ and composed.run.dir and isinstance(error, Exception) and is_rank_zero():
        _note(Path(composed.run.dir), shown(message(error)))


def unique(jobs: Sequence[Job]) -> list[Job]:
    """One for each folder: equal jobs are the same run."""
    return list({job.folder.path: job for job in jobs}.values())


def varied(jobs: Sequence[Job]) -> list[str]:
    """The keys in whose overrides the jobs differ, in order."""
    keys = dict.fromkeys(key(o) for job in jobs for o in job.overrides)
    return [k for k in keys if len({value(job, k) for job in jobs}) > 1]


def told(job: Job, keys: Sequence[str]) -> str:
    """What a job finds in its environment under `OF_A_SWEEP`: its values of the keys that tell it from the
    others.
    """
    return json.dumps({k: value(job, k) for k in keys if value(job, k)})


def value(job: Job, wanted: str) -> str:
    """What a job's override gives a key; the last one counts."""
    return next((o.partition("=")[2] for o in reversed(job.overrides) if key(o) == wanted), "")


def key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def _note(folder: Path, reason: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(_error_file(folder), reason + "\n")


def _error_file(folder: Path) -> Path:
    return folder / "error.txt"
