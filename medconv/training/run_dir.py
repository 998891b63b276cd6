"""A run's folder: its path, lock, checkpoints, and the config it was started with."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medconv.config import ConfigError, Node, RunConfig
from medconv.config.yaml_text import to_yaml
from medconv.training import data_identity, run_metadata, summary
from medconv.training.checkpoint import BEST, LAST, PREVIOUS, log_rewind
from medconv.training.config_identity import config_differences
from medconv.training.data_identity import DataIdentity
from medconv.training.resume_source import ResumeSource, find_source, is_inside, read_config
from medconv.training.run_lock import RunLock
from medconv.utils import checkpoint_io, cluster
from medconv.utils.atomic_io import DISK_ERRORS, write_text
from medconv.utils.logging import log_into

log = logging.getLogger(__name__)
# Choices of the plan that depend on the machine and on time, so a resumed run keeps them.
_PLANNED = ("memory_gb", "size", "slice_axis")


def is_rank_zero() -> bool:
    """Whether this process is the first of the run, which writes; also known before `fit`."""
    return cluster.is_first()


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
        self._lock = RunLock(self.path)

    @classmethod
    def of(cls, config: RunConfig, choices: Mapping[str, str]) -> RunDir:
        """The folder of a config: `run.dir`, else `runs/<run.name>`, else named after its main choices."""
        if config.run.resume not in ("auto", "never") and not Path(config.run.resume).is_file():
            raise ConfigError(
                f"run.resume must be auto, never or a checkpoint, got {config.run.resume}: no such file"
            )
        path = Path(config.run.dir) if config.run.dir else None
        if path is None:
            path = Path("runs") / (config.run.name or default_name(config, choices))
        folder = cls(path, config.run.resume)
        if folder._is_restarted():
            # Else each restart of the job would lose what the last one trained
            folder.resume = "auto"
        return folder

    def _is_restarted(self) -> bool:
        """Whether the launcher has restarted the job that trained here."""
        return cluster.restarted() and self.has_own() and self.summary().get("job") == cluster.job()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        return self.checkpoints / BEST

    @property
    def last(self) -> Path:
        return self.checkpoints / LAST

    @property
    def previous(self) -> Path:
        return self.checkpoints / PREVIOUS

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
        lines = config_differences(self._earlier_config(), config.plain())
        earlier_data = data_identity.read(self.path)
        if data is not None and earlier_data is not None and self.resume == "auto":
            lines += data_identity.differences(earlier_data, data)
        self._check_same(lines)
        return self.resume == "auto" and self.summary().get("status") == "done"

    def begin(self, config: RunConfig, data: DataIdentity | None = None) -> None:
        """Make and lock the folder, write `config.yaml` and the data's identity.

        The logs are cut back to the checkpoint to resume from.

        Raises: ConfigError: another process is training there.
        """
        if not is_rank_zero():
            return
        if self.resume == "never" and self.path.is_dir():
            self._move_aside()
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock.claim()
        if _stamp(self.last) != self._last_stamp:
            self._source = None  # another process has trained here in the meantime
        self._remove_what_is_not_continued()
        write_text(self.path / "config.yaml", to_yaml(config.plain()))
        if data is not None:
            data_identity.write(self.path, data)
        log_into(self.path / "train.log")

    def _move_aside(self) -> None:
        self._lock.claim()
        timestamp = time.strftime("%Y%m%d-%H%M%S")
        moved = self.path.with_name(f"{self.path.name}.{timestamp}")
        self.path.rename(moved)
        log.info("moved the earlier run to %s", moved)

    def _remove_what_is_not_continued(self) -> None:
        """Leaves what belongs to the checkpoint to resume from; of a new run, nothing."""
        checkpoint = self.resume_from()
        if checkpoint is None:
            if (self.path / "config.yaml").is_file():
                log.info(
                    "%s: nothing to resume, its run left no checkpoint; it starts from the beginning",
                    self.path,
                )
            shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        elif not is_inside(checkpoint, self.checkpoints):
            self.best.unlink(missing_ok=True)  # of an earlier attempt
        if checkpoint == self.previous and self.last.is_file():
            # Else the damaged one would become the next previous.ckpt
            self.last.replace(self.last.with_name("damaged.ckpt"))
        log_rewind.rewind(self.path, self._source.log_sizes if self._source else {})
        # Partial files, left by a killed process
        for partial in self.checkpoints.glob(".*.ckpt"):
            partial.unlink(missing_ok=True)

    def close(self) -> None:
        self._lock.close()

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

    def _earlier_config(self) -> dict[str, Any]:
        """The config of the run in this folder. Raises: ConfigError: it is missing, empty or damaged."""
        return read_config(self.path / "config.yaml", self.last)

    def planned(self) -> Node:
        """`memory_gb`, `size` and `slice_axis` of the plan of the run to resume, which keeps them on another
        machine and for another time; a new run has none.
        """
        checkpoint = self.resume_from()
        if checkpoint is None:
            return {}
        if self.resume == "auto":
            config = self._earlier_config()
        else:
            config = checkpoint_io.read(checkpoint)["medconv"]["config"]
        # Runs before there were sizes have no `size`
        recorded = {"size": "full", **config["derived"]}
        return {key: recorded[key] for key in _PLANNED if recorded.get(key) is not None}

    def summary(self) -> dict[str, Any]:
        """Content of `summary.json`; empty if it does not exist. Raises: ValueError: damaged, or not ours."""
        return summary.read(self.path / "summary.json")

    def write_summary(self, **values: Any) -> None:
        if is_rank_zero():
            content = {**summary.empty(), **self.summary(), **values}
            write_text(self.path / "summary.json", json.dumps(content, indent=2) + "\n")

    @contextmanager
    def recording(self, trainer: Any, profiler: Any) -> Iterator[None]:
        """Keep `summary.json` up to date while the block trains, also if it ends with an exception."""
        self.write_summary(status="running", **run_metadata.of(trainer))
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
            samples_per_second=profiler.samples_per_second,
            data_wait_share=profiler.data_wait_share,
            step_shares=profiler.shares(),
            peak_memory_bytes=run_metadata.peak_memory(),
            **self._scores(),
        )

    def _scores(self) -> dict[str, Any]:
        """Scores of the best checkpoint, as recorded in it."""
        if not (is_rank_zero() and self.best.is_file()):
            return {}
        try:
            record = checkpoint_io.read(self.best)["medconv"]
        except ValueError as error:
            log.warning("%s; summary.json has none of its scores", error)
            return {}
        return summary.scores(record)

    def _check_same(self, differences: list[str]) -> None:
        """Raises: ConfigError: there are differences; lists them."""
        if differences:
            lines = "\n".join(f"  {difference}" for difference in differences)
            raise ConfigError(
                f"{self.path} holds a run with another config or other data; choose another run.name (with "
                f"run.resume={self.last} it continues from there), or run.resume=never\n{lines}"
            )


def _stamp(path: Path) -> tuple[int, int] | None:
    """Inode and time of change, which differ if a file was replaced; None: there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def default_name(config: RunConfig, choices: Mapping[str, str]) -> str:
    """Main choices and a hash of the whole config: the same command finds its run again.

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
