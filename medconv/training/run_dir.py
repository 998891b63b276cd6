"""A run's folder: its path, lock, config, logs, and the checkpoint that it resumes from."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from yaml import AliasEvent, SafeLoader, YAMLError, parse

from medconv.config import ConfigError, RunConfig
from medconv.config.values import from_yaml, to_yaml
from medconv.planning.limits import EarlierPlan
from medconv.training import identity, summary
from medconv.training.checkpoint import BEST, LAST, LOG_SIZES, PREVIOUS
from medconv.training.identity import DataIdentity, config_differences
from medconv.training.log_files import METRICS_CSV, TENSORBOARD, rewind_logs
from medconv.utils import checkpoint_io, cluster
from medconv.utils.atomic_io import DISK_ERRORS, write_text
from medconv.utils.logging import log_into

log = logging.getLogger(__name__)
_MAX_BYTES = 16 * 2**20  # of a config; ours have some kilobytes, and a few megabytes with a key for each case


@dataclass
class RunDir:
    """One run's folder. Only rank 0 writes to it.

    Args:
        path: of the folder, which `begin` makes.
        resume: `auto` resumes from `checkpoints/last.ckpt` if it exists, `never` moves an earlier run
            aside, anything else is the checkpoint to resume from. If `last.ckpt` is damaged,
            `previous.ckpt` is used.
        started_at: when the run began in this process, by `time.monotonic`.
    """

    path: Path
    resume: str = "auto"
    started_at: float = field(default_factory=time.monotonic)
    _source: ResumeSource | None = None  # None: not yet looked for
    _last_stamp: tuple[int, int] | None = None  # of `last.ckpt`, when the source was looked for

    def __post_init__(self) -> None:
        self.checkpoints = self.path / "checkpoints"
        self.best = self.checkpoints / BEST
        self.last = self.checkpoints / LAST
        self.previous = self.checkpoints / PREVIOUS
        self._lock: IO[bytes] | None = None

    @classmethod
    def of(cls, config: RunConfig, choices: Mapping[str, str]) -> RunDir:
        """The folder of a config: `run.dir`, else `runs/<run.name>`, else named after its main choices."""
        if config.run.resume not in ("auto", "never") and not Path(config.run.resume).is_file():
            is_folder = Path(config.run.resume).is_dir()
            problem = "a folder; its file is checkpoints/last.ckpt" if is_folder else "no such file"
            raise ConfigError(
                f"run.resume must be auto, never or a checkpoint, got {config.run.resume}: {problem}"
            )
        path = Path(config.run.dir) if config.run.dir else None
        if path is None:
            path = Path("runs") / (config.run.name or default_name(config, choices))
        folder = cls(path, config.run.resume)
        # A launcher may have restarted the job that trained here: each restart would lose what the last one
        # trained
        is_restarted = folder.resume != "auto" and cluster.restarted()
        if is_restarted and folder.has_own() and folder.summary().get("job") == cluster.job():
            folder.resume = "auto"
        return folder

    @property
    def trained(self) -> Path:
        """The checkpoint to predict with: the best; the last where nothing was validated."""
        return self.best if self.best.is_file() else self.last

    def finished(self, config: RunConfig, data: DataIdentity | None = None) -> bool:
        """Whether this run, with this config and data, has already been trained to its end here.

        Args:
            data: None: not compared.
        Raises:
            ConfigError: the run in this folder has another config or other data; the message lists the
                differences.
        """
        if self.resume == "never" or not self.has_own():
            return False
        lines = config_differences(self.earlier_config(), config.plain())
        earlier_data = identity.read_data_identity(self.path)
        if data is not None and earlier_data is not None and self.resume == "auto":
            lines += identity.data_differences(earlier_data, data)
        if lines:
            differences = "\n".join(f"  {line}" for line in lines)
            raise ConfigError(
                f"{self.path} holds a run with another config or other data; choose another run.name (with "
                f"run.resume={self.last} it continues from there), or run.resume=never\n{differences}"
            )
        return self.resume == "auto" and self.summary().get("status") == "done"

    def begin(self, config: RunConfig, data: DataIdentity | None = None) -> None:
        """Make and lock the folder, write `config.yaml` and the data's identity.

        The logs are cut back to the checkpoint to resume from.

        Raises: ConfigError: another process is training there.
        """
        if not cluster.is_first():
            return
        if self.resume == "never":
            self.move_aside()
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.claim()
        if _stamp(self.last) != self._last_stamp:
            self._source = None  # another process has trained here in the meantime
        checkpoint = self.resume_from()
        if checkpoint is not None:
            self._keep_what_is_continued(checkpoint)
        else:
            if (self.path / "config.yaml").is_file():
                log.info(
                    "%s: nothing to resume, its run left no checkpoint; it starts from the beginning",
                    self.path,
                )
            (self.path / METRICS_CSV).unlink(missing_ok=True)
            shutil.rmtree(self.path / TENSORBOARD, ignore_errors=True)
        # Partial files, left by a killed process
        for partial in self.checkpoints.glob(".*.ckpt"):
            partial.unlink(missing_ok=True)
        write_text(self.path / "config.yaml", to_yaml(config.plain()))
        if data is not None:
            write_text(self.path / identity.CASES_FILE, json.dumps(data) + "\n")
        log_into(self.path / "train.log")

    def move_aside(self) -> None:
        """Rename the folder, if there is one. Raises: ConfigError: another process is training there."""
        if not self.path.is_dir():
            return
        self.claim()
        timestamp = time.strftime("%Y%m%d-%H%M%S")
        moved = self.path.with_name(f"{self.path.name}.{timestamp}")
        self.path.rename(moved)
        self.close()
        log.info("moved the earlier run to %s", moved)

    def _keep_what_is_continued(self, checkpoint: Path) -> None:
        """Leaves what belongs to the checkpoint to resume from."""
        if not is_inside(checkpoint, self.checkpoints):
            self.best.unlink(missing_ok=True)  # of an earlier attempt
        if checkpoint == self.previous and self.last.is_file():
            # Else the damaged one would become the next previous.ckpt
            self.last.replace(self.last.with_name("damaged.ckpt"))
        rewind_logs(self.path, self._source.log_sizes if self._source else {})

    def claim(self) -> None:
        """Lock the folder by its file `.lock`, anew if this process has done so.

        The system releases the lock when the process ends, on whatever machine; loader workers do not
        inherit it.

        Raises: ConfigError: another process holds it, or has just moved the folder aside.
        """
        if self._lock is not None:
            self.close()
        path = self.path / ".lock"
        is_ours = False
        with suppress(FileNotFoundError):
            self._lock = path.open("ab")
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = True
            except OSError as error:
                is_free = error.errno not in (errno.EAGAIN, errno.EACCES)
                if is_free:  # some file systems have no locks
                    log.debug("%s: cannot be locked against other processes (%s)", self.path, error)
            is_ours = is_free and os.path.samestat(os.fstat(self._lock.fileno()), path.stat())
        if not is_ours:
            raise ConfigError(
                f"{self.path}: another process is training there; wait until it ends, or choose another "
                "run.name"
            )

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def resume_from(self) -> Path | None:
        """The checkpoint to resume from, read once and checked for damage; None for a new run.

        Raises: ValueError: all checkpoints are damaged.
        """
        if self._source is None:
            self._last_stamp = _stamp(self.last)
            self._source = find_source(self.checkpoints, self.resume)
        return self._source.checkpoint

    def has_own(self) -> bool:
        """Whether a run has left a checkpoint here."""
        return self.last.is_file() or self.previous.is_file()

    def earlier_config(self) -> dict[str, Any]:
        """The config of the run in this folder. Raises: ConfigError: it is missing, empty or damaged."""
        return read_config(self.path / "config.yaml", self.last)

    def earlier_plan(self) -> EarlierPlan | None:
        """What the run to resume keeps on another machine, for another time and with a later version; None:
        a new run.
        """
        checkpoint = self.resume_from()
        if checkpoint is None:
            return None
        if self.resume == "auto":
            config = self.earlier_config()
        else:
            config = checkpoint_io.read(checkpoint)["medconv"]["config"]
        derived = config["derived"]
        slice_axis = derived.get("slice_axis")
        return EarlierPlan(
            origin="as when this run began",
            memory_gb=derived.get("memory_gb"),
            size=derived.get("size"),
            takes_slices=slice_axis is not None,
            slice_axis=slice_axis,
            normalisation=tuple(derived.get("normalisation") or ()),
        )

    def global_batch_size(self) -> int | None:
        """That of the run to resume, which keeps it with any number of processes; None: a new run."""
        if self.resume != "auto" or self.resume_from() is None:
            return None
        size: int | None = self.earlier_config()["data"].get("global_batch_size")
        return size

    def summary(self) -> dict[str, Any]:
        """Content of `summary.json`; empty if it does not exist. Raises: ValueError: damaged, or not ours."""
        path = self.path / "summary.json"
        if not path.is_file():
            return {}
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from error
        if not summary.is_valid(content):
            raise ValueError(
                f"{path}: not what medconv writes there, an object with a row of Dice per class for each case"
            )
        return content

    def write_summary(self, **values: Any) -> None:
        """Change these keys; those that other programs rely on are there from the beginning, as null."""
        if cluster.is_first():
            content = {**dict.fromkeys(summary.KEYS), **self.summary(), **values}
            write_text(self.path / "summary.json", json.dumps(content, indent=2) + "\n")

    @contextmanager
    def recording(self, trainer: Any, profiler: Any) -> Iterator[None]:
        """Keep `summary.json` up to date while the block trains, also if it ends with an exception."""
        self.write_summary(status="running", **summary.run_metadata(trainer))
        try:
            yield
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in DISK_ERRORS and error.filename is None:
                # TensorBoard's thread names no file
                error.filename = str(self.path)
            with suppress(OSError):  # a full or failed disk is reported once
                self._conclude(summary.status_after(error), trainer, profiler)
            raise
        self._conclude("done", trainer, profiler)

    def _conclude(self, status: str, trainer: Any, profiler: Any) -> None:
        self.write_summary(
            status=status,
            steps=trainer.global_step,
            wall_seconds=round(profiler.wall_seconds, 1),
            fit_seconds=round(profiler.fit_seconds, 1),
            samples_per_second=profiler.samples_per_second,
            data_wait_share=profiler.data_wait_share,
            step_shares=profiler.shares(),
            peak_memory_bytes=summary.peak_memory(trainer.strategy.root_device.type == "cuda"),
            **self._scores(),
        )

    def _scores(self) -> dict[str, Any]:
        """Scores of the best checkpoint, as recorded in it."""
        if not (cluster.is_first() and self.best.is_file()):
            return {}
        try:
            record = checkpoint_io.read(self.best)["medconv"]
        except ValueError as error:
            log.warning("%s; summary.json has none of its scores", error)
            return {}
        return summary.best_scores(record)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Inode and time of change, which differ if a file was replaced; None: there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def default_name(config: RunConfig, choices: Mapping[str, str]) -> str:
    """Main choices and a hash of the whole config: the same command finds its run again.

    Keys that may change when a run resumes (`identity.FREE`) count too: another number of devices or workers,
    tried without a `run.name`, is a run to compare with, not one that is finished.

    Args:
        choices: option of each group of the config, such as `conv` to `basis`.
    """
    not_trained = ("run", "tags", "test", "derived")
    content = {key: value for key, value in config.plain().items() if key not in not_trained}
    # Without keys that have their default: which keys there are depends on Lightning's version.
    defaults = type(config.trainer)()
    trainer = content["trainer"]
    content["trainer"] = {key: trainer[key] for key in trainer if trainer[key] != getattr(defaults, key)}
    words = [choices.get(group, "custom") for group in ("data", "model", "conv")]
    return "-".join([*words, f"fold{config.data.fold}", short_hash(content)])


def short_hash(content: Any) -> str:
    """Eight hexadecimal digits for plain values, whatever the order of keys."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class ResumeSource:
    """The checkpoint to resume from, which has been read and is not damaged.

    Args:
        checkpoint: None: a new run.
        log_sizes: of the run's logs when the checkpoint was written, as in `measure_logs`; empty if
            the checkpoint is of another folder, whose logs are not continued.
    """

    checkpoint: Path | None = None
    log_sizes: Mapping[str, int] = field(default_factory=dict)


def find_source(checkpoints: Path, resume: str) -> ResumeSource:
    """The checkpoint that a run continues.

    Args:
        checkpoints: folder of the run's checkpoints.
        resume: `auto`, `never` or the path of a checkpoint.
    Raises:
        ConfigError: all checkpoints of the folder are damaged.
        ValueError: the checkpoint at the path is damaged.
    """
    if resume == "never":
        return ResumeSource()
    if resume != "auto":
        checkpoint = Path(resume)
        log_sizes = _log_sizes(checkpoint) if is_inside(checkpoint, checkpoints) else {}
        return ResumeSource(checkpoint, log_sizes)
    last = checkpoints / LAST
    previous = checkpoints / PREVIOUS
    if not last.is_file() and not previous.is_file():
        return ResumeSource()
    try:
        return ResumeSource(last, _log_sizes(last))
    except ValueError as error:
        if not previous.is_file():
            raise ConfigError(
                f"{error}; there is no earlier checkpoint, run.resume=never starts a new run"
            ) from error
        log.warning("%s; resuming from the previous checkpoint, %s", error, previous)
    try:
        return ResumeSource(previous, _log_sizes(previous))
    except ValueError as error:
        raise ConfigError(
            f"{error}; so is every checkpoint in {checkpoints} to resume from. run.resume=never starts a new "
            f"run; if {checkpoints / BEST} is intact, run.resume={checkpoints / BEST} with another run.name "
            "continues from it"
        ) from error


def is_inside(checkpoint: Path, folder: Path) -> bool:
    """Whether a checkpoint is one of those of a folder."""
    return checkpoint.resolve().parent == folder.resolve()


def _log_sizes(checkpoint: Path) -> dict[str, int]:
    """Raises: ValueError: the checkpoint is damaged."""
    sizes: dict[str, int] = checkpoint_io.read(checkpoint).get(LOG_SIZES, {})
    return sizes


def read_config(path: Path, last: Path) -> dict[str, Any]:
    """The config of the earlier start of a run.

    Args:
        path: its `config.yaml`.
        last: its last checkpoint, for the message.
    Raises:
        ConfigError: the file is missing, empty or damaged.
    """
    content: Any = None
    problem = "missing"
    if path.is_file():
        problem = "empty, or not a config"
        try:
            content = from_yaml(config_text(path))
        except (OSError, ValueError, YAMLError, RecursionError) as error:
            problem = f"damaged ({' '.join(str(error).split())})"
    if not isinstance(content, dict) or not isinstance(content.get("derived"), dict):
        raise ConfigError(
            f"{path}: {problem}; the run in this folder cannot resume without it. Its checkpoints are "
            f"intact: run.resume={last} with another run.name resumes from them, run.resume=never "
            "starts a new run"
        )
    return content


def config_text(path: Path) -> str:
    """The text of a run's `config.yaml`, which is safe to parse.

    Raises:
        OSError: it cannot be read.
        ValueError: too large, no text, or with aliases.
    """
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise ValueError(f"{size / 2**20:.0f} MB, a config has at most {_MAX_BYTES // 2**20}")
    text = path.read_text(encoding="utf-8")
    # A few lines of aliases can stand for billions of values
    if any(isinstance(event, AliasEvent) for event in parse(text, Loader=SafeLoader)):
        raise ValueError("it has YAML aliases, which medconv does not write")
    return text
