"""A run's folder: its path, lock, checkpoints, and the config it was started with."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from medconv.config import ConfigError, Node, RunConfig, flatten
from medconv.training import run_metadata, summary
from medconv.training.checkpoint import log_rewind
from medconv.utils import checkpoint_io, cluster
from medconv.utils.atomic_io import NO_ROOM, write_text
from medconv.utils.logging import log_into

log = logging.getLogger(__name__)
# Prefixes of keys that may change when a run resumes: none of them changes what is trained.
FREE = (
    "run.",
    "logger.",
    "callbacks.",
    "data.cache_dir",
    "data.num_workers",
    "data.prefetch_factor",
    "data.persistent_workers",
    "data.prepare_workers",
    "perf.timeout_seconds",
    "trainer.enable_progress_bar",
    "trainer.log_every_n_steps",
    "trainer.num_sanity_val_steps",
    "tags",
    "test",
    "derived.monitor",  # these four follow from other keys
    "derived.stem",
    "derived.num_train_cases",
    "loss.class_names",
    "derived.size",  # what it decides is compared
)
_PLANNED = ("memory_gb", "size", "slice_axis")


def is_rank_zero() -> bool:
    """Whether this process is the first of the run, which writes; also known before `fit`."""
    return cluster.is_first()


@dataclass
class RunDir:
    """One run's folder. Only rank 0 writes to it.

    Args:
        resume: `auto` resumes from `checkpoints/last.ckpt` if it exists, `never` moves an earlier run
            aside, anything else is the checkpoint to resume from. If `last.ckpt` is damaged,
            `previous.ckpt` is used.
        begun: when the run began in this process, by `time.monotonic`.
    """

    path: Path
    resume: str = "auto"
    begun: float = field(default_factory=time.monotonic)
    # the checkpoint to resume from, and the sizes of its logs; once looked for
    _source: tuple[Path | None, dict[str, int]] | None = None
    _lock: IO[bytes] | None = None

    @classmethod
    def of(cls, config: RunConfig, choices: Mapping[str, str]) -> RunDir:
        """The folder of a config: `run.dir`, else `runs/<run.name>`, else named after its main choices."""
        if config.run.resume not in ("auto", "never") and not Path(config.run.resume).is_file():
            raise ConfigError(
                f"run.resume must be auto, never or a checkpoint, got {config.run.resume}: no such file"
            )
        name = config.run.name or default_name(config, choices)
        folder = cls(Path(config.run.dir) if config.run.dir else Path("runs") / name, config.run.resume)
        if cluster.restarted() and folder.has_own() and folder.summary().get("job") == cluster.job():
            folder.resume = "auto"  # else each restart of the job would lose what the last one trained
        return folder

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        return self.checkpoints / "best.ckpt"

    @property
    def last(self) -> Path:
        return self.checkpoints / "last.ckpt"

    @property
    def previous(self) -> Path:
        return self.checkpoints / "previous.ckpt"

    def finished(self, config: RunConfig) -> bool:
        """Whether this run, with this config, has already been trained to its end here.

        Raises: ConfigError: the run in this folder has another config; the message lists the differences.
        """
        if self.resume == "never" or not self.has_own():
            return False
        self._check_same(self._config(), config.plain())
        return self.resume == "auto" and self.summary().get("status") == "done"

    def begin(self, config: RunConfig) -> None:
        """Make and lock the folder, write `config.yaml`, cut the logs back to the checkpoint to resume from.

        Raises: ConfigError: another process is training there.
        """
        if not is_rank_zero():
            return
        if self.resume == "never" and self.path.is_dir():
            self._claim()
            aside = self.path.with_name(f"{self.path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
            self.path.rename(aside)
            log.info("moved the earlier run to %s", aside)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._claim()
        source = self.resume_from()
        if source is None:
            if (self.path / "config.yaml").is_file():
                log.info("%s: nothing to resume, its run left no checkpoint; it begins anew", self.path)
            shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        elif source == self.previous and self.last.is_file():  # else it would become the next previous.ckpt
            self.last.replace(self.last.with_name("damaged.ckpt"))
        if source is not None and not self._is_own(source):  # a best one here is of an earlier attempt
            self.best.unlink(missing_ok=True)
        log_rewind.rewind(self.path, self._source[1] if self._source else {})
        for partial in self.checkpoints.glob(".*.ckpt"):  # left by a killed process
            partial.unlink(missing_ok=True)
        write_text(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config.plain())))
        log_into(self.path / "train.log")

    def _claim(self) -> None:
        """Lock the folder. The system releases the lock when the process ends; workers do not inherit it."""
        self.close()
        self._lock = (self.path / ".lock").open("ab")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise ConfigError(
                    f"{self.path}: another process is training there; wait until it ends, or choose another "
                    "run.name"
                ) from error
            log.debug("%s: cannot be locked against other processes (%s)", self.path, error)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def resume_from(self) -> Path | None:
        """The checkpoint to resume from, read once and checked for damage; None for a new run.

        Raises: ValueError: all checkpoints are damaged.
        """
        if self._source is None:
            self._source = self._find_source()
        return self._source[0]

    def _find_source(self) -> tuple[Path | None, dict[str, int]]:
        if self.resume == "never" or (self.resume == "auto" and not self.has_own()):
            return None, {}
        if self.resume != "auto":
            path = Path(self.resume)
            return path, checkpoint_io.read(path).get("curves", {}) if self._is_own(path) else {}
        try:
            return self.last, checkpoint_io.read(self.last).get("curves", {})
        except ValueError as error:
            if not self.previous.is_file():
                raise ConfigError(
                    f"{error}; there is no earlier checkpoint, run.resume=never starts a new run"
                ) from error
            log.warning("%s; resuming from the previous checkpoint, %s", error, self.previous)
        return self.previous, checkpoint_io.read(self.previous).get("curves", {})

    def _is_own(self, checkpoint: Path) -> bool:
        return checkpoint.resolve().parent == self.checkpoints.resolve()

    def has_own(self) -> bool:
        """Whether a run has left a checkpoint here."""
        return self.last.is_file() or self.previous.is_file()

    def _config(self) -> dict[str, Any]:
        """The config of the run in this folder. Raises: ConfigError: it is missing, empty or damaged."""
        path = self.path / "config.yaml"
        try:
            content = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else None
        except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
            content, reason = None, f"damaged ({' '.join(str(error).split())})"
        else:
            reason = "empty, or not a config" if path.is_file() else "missing"
        if not isinstance(content, dict) or not isinstance(content.get("derived"), dict):
            raise ConfigError(
                f"{path}: {reason}; the run in this folder cannot resume without it. Its checkpoints are "
                f"intact: run.resume={self.last} with another run.name resumes from them, run.resume=never "
                "starts a new run"
            )
        return content  # type: ignore[return-value]

    def planned(self) -> Node:
        """`memory_gb`, `size` and `slice_axis` of the plan of the run to resume, which keeps them on another
        machine and for another time; a new run has none.
        """
        source = self.resume_from()
        if source is None:
            return {}
        auto = self.resume == "auto"
        config = self._config() if auto else checkpoint_io.read(source)["medconv"]["config"]
        recorded = {"size": "large", **config["derived"]}  # of runs before there were sizes
        return {key: recorded[key] for key in _PLANNED if recorded.get(key) is not None}

    def summary(self) -> dict[str, Any]:
        """Content of `summary.json`; empty if it does not exist. Raises: ValueError: damaged, or not ours."""
        path = self.path / "summary.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from error
        if not summary.is_valid(content):
            raise ValueError(
                f"{path}: not what medconv writes there, an object with a row of Dice per class for each case"
            )
        return content

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
            if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
                error.filename = str(self.path)  # raised by TensorBoard's thread
            with suppress(OSError):  # a full disk is reported once
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

    def _check_same(self, earlier: Node, now: Node) -> None:
        old, new = flatten(earlier), flatten(now)
        # keys that only one version of Lightning has
        free = (*FREE, *(f"trainer.{k}" for k in {*earlier.get("trainer", {})} ^ {*now["trainer"]}))
        changed = [
            k for k in sorted({*old, *new}) if old.get(k) != new.get(k) and not f"{k}.".startswith(free)
        ]
        if changed:
            lines = "\n".join(f"  {k}: {old.get(k)} there, {new.get(k)} now" for k in changed)
            raise ConfigError(
                f"{self.path} holds a run with another config; choose another run.name (with "
                f"run.resume={self.last} it trains on from there), or run.resume=never\n{lines}"
            )


def default_name(config: RunConfig, choices: Mapping[str, str]) -> str:
    """Main choices and a hash of the whole config: the same command finds its run again."""
    content = {
        key: value for key, value in config.plain().items() if key not in ("run", "tags", "test", "derived")
    }
    default = type(config.trainer)()  # whose keys depend on Lightning's version
    content["trainer"] = {k: v for k, v in content["trainer"].items() if v != getattr(default, k)}
    words = [choices.get(group, "custom") for group in ("data", "model", "conv")]
    return "-".join([*words, f"fold{config.data.fold}", short_hash(content)])


def short_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:8]
