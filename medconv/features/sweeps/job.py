"""One job of a sweep: its overrides, its folder, its command, and how it ended."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from medconv.config.compose import Composed, as_override
from medconv.training.run_dir import RunDir, short_hash
from medconv.utils import child_processes, cluster
from medconv.utils.atomic_io import write_text
from medconv.utils.logging import message, shown

# Keys of overrides that do not change what is trained.
_NOT_OF_THE_RUN = ("hparams_search", "run.dry_run")
# Keys, with a dot after them, whose overrides do not change the name of a sweep's folder.
_SAME_SWEEP = (
    "run.dry_run.",
    "data.fold.",
    "hydra.sweeper.n_trials.",
    "hydra.sweeper.n_jobs.",
    "hydra/launcher.",
    "hydra.launcher.",
)
# Beginnings of Hydra's own keys that its jobs do not get
_OF_THE_SWEEP = ("hydra.mode", "hydra.launcher", "hydra.sweeper", "hydra.sweep.", "hydra.run.")
# Flags of the command line by Hydra's name of a source of configs.
_SOURCE_FLAGS = {"command-line": "--config-dir", "main": "--config-path"}
_ERROR_FILE = "error.txt"
RUN_JOB = "medconv.features.sweeps.run_job"  # the module that is a job's process
_ESCAPED_CHARACTER = re.compile(r"\\([\\()\[\]{}:=,\s])")


@dataclass
class Job:
    """One config of a sweep.

    Args:
        flags: where its config comes from, such as `--config-dir`.
        home: the sweep's folder.
        code: its exit code; None until it has ended.
        config: a hash of what is trained.
        data: the group `data` of its config, as JSON.
    """

    overrides: tuple[str, ...]
    flags: tuple[str, ...]
    home: Path
    code: int | None = None
    config: str = ""
    data: str = ""

    @classmethod
    def of(cls, composed: Composed, typed: Sequence[str]) -> Self:
        """The job of a composed config. Args: typed: the overrides of the whole sweep."""
        all_overrides: Any = OmegaConf.to_container(composed.settings.overrides.task, resolve=False)
        content: Any = OmegaConf.to_container(composed.values, resolve=False)
        trained = {name: group for name, group in content.items() if name != "run"}
        return cls(
            overrides=tuple(o for o in all_overrides if key(o) not in _NOT_OF_THE_RUN),
            flags=_config_flags(composed.settings),
            home=home(composed.values, typed),
            config=short_hash(trained),
            data=json.dumps(trained["data"], sort_keys=True),
        )

    @property
    def folder(self) -> RunDir:
        """Its run folder, named by a hash of the sorted overrides: the same sweep finds its runs again."""
        return RunDir(self.home / short_hash(sorted(self.overrides)))

    @property
    def arguments(self) -> list[str]:
        """Arguments of `medconv train`. `hydra.mode=RUN`: the user's own config may ask for a sweep."""
        return [*self.flags, "hydra.mode=RUN", *self.overrides, as_override("run.dir", self.folder.path)]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", RUN_JOB, str(self.folder.path), *self.arguments]

    def begin(self) -> None:
        """Forget how an earlier attempt ended."""
        self.code = None
        self._error_file.unlink(missing_ok=True)

    def write_error(self, reason: str) -> None:
        """Write into its folder why it failed, for the table."""
        _write_error(self.folder.path, reason)

    @property
    def _error_file(self) -> Path:
        return self.folder.path / _ERROR_FILE

    @property
    def has_error(self) -> bool:
        """Whether its folder says why it failed. A job that was stopped writes nothing."""
        return self._error_file.is_file()

    @property
    def status(self) -> str:
        """Status of its summary; `failed` if the exit code says so."""
        if self.code == 0:
            return "done"
        status = str(self.folder.summary().get("status") or "not begun")
        if self.code is not None and status in ("done", "running", "not begun"):
            return "failed"
        return status

    @property
    def reason(self) -> str:
        """Why it failed, in one line; empty if it did not."""
        if not self.code:
            return ""
        end = child_processes.end_of(self.code)
        try:
            error = self._error_file.read_text(encoding="utf-8").splitlines()[0]
        except (OSError, UnicodeDecodeError, IndexError):
            error = ""
        return f"{end}: {error}" if error else end


def _config_flags(settings: Any) -> tuple[str, ...]:
    """Flags by which another process finds the same main config and folders. Args: settings: Hydra's."""
    flags = []
    for source in settings.runtime.config_sources:
        if source.provider in _SOURCE_FLAGS:
            flags += [_SOURCE_FLAGS[source.provider], source.path]
    flags += ["--config-name", settings.job.config_name]
    for override in settings.overrides.hydra:
        if not key(override).replace("/", ".").startswith(_OF_THE_SWEEP):
            flags.append(override)
    return tuple(flags)


def home(composed: DictConfig, typed: Sequence[str]) -> Path:
    """The sweep's folder: `run.dir`, `runs/<run.name>`, or named by the overrides not in `_SAME_SWEEP`.

    Args: typed: the overrides of the whole sweep.
    """
    if composed.run.dir:
        return Path(composed.run.dir)
    if composed.run.name:
        return Path("runs", composed.run.name)
    naming_overrides = [o for o in typed if not f"{key(o)}.".startswith(_SAME_SWEEP)]
    return Path("runs") / f"sweep-{short_hash(sorted(naming_overrides))}"


def note_failure(folder: Path, error: Exception) -> None:
    """Inside a job: write the error into its folder, for the table."""
    if cluster.is_first():
        _write_error(folder, shown(message(error)))


def unique(jobs: Sequence[Job]) -> list[Job]:
    """One job per folder: jobs with the same overrides are the same run."""
    return list({job.folder.path: job for job in jobs}.values())


def varied(jobs: Sequence[Job]) -> list[str]:
    """The keys whose values differ between the jobs, in order."""
    # Not a set, which has no order.
    keys = dict.fromkeys(key(override) for job in jobs for override in job.overrides)
    varied_keys = []
    for name in keys:
        values = {value(job, name) for job in jobs}
        if len(values) > 1:
            varied_keys.append(name)
    return varied_keys


def values_json(job: Job, keys: Sequence[str]) -> str:
    """The job's values of these keys as JSON, for the environment variable `HPARAMS`."""
    return json.dumps(_values(job, keys))


def settings_of(job: Job, keys: Sequence[str]) -> str:
    """The overrides of these keys, without those that it does not have."""
    return " ".join(f"{name}={text}" for name, text in _values(job, keys).items())


def _values(job: Job, keys: Sequence[str]) -> dict[str, str]:
    values = {name: value(job, name) for name in keys}
    return {name: text for name, text in values.items() if text}


def value(job: Job, name: str) -> str:
    """A job's value of a key, without the backslashes that Hydra adds, or ""; its last override counts."""
    for override in reversed(job.overrides):
        if key(override) == name and override.startswith("~"):
            return "null"
        if key(override) == name:
            text = override.partition("=")[2]
            # In quotes Hydra adds no backslashes.
            return text if text[:1] in ("'", '"') else _ESCAPED_CHARACTER.sub(r"\1", text)
    return ""


def key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _write_error(folder: Path, reason: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / _ERROR_FILE, reason + "\n")
