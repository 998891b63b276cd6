"""A run's folder: its place, what it remembers of its config, and what `summary.json` holds."""

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

from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from medconv.config import ConfigError, flatten
from medconv.metrics import image_level
from medconv.metrics.dice import mean, mean_per_class
from medconv.targets.image_level import ImageLevelTargets
from medconv.training import run_metadata
from medconv.training.checkpoint import log_rewind
from medconv.training.tasks.image_level import arrays
from medconv.utils import checkpoint_io, cluster
from medconv.utils.atomic_io import NO_ROOM, write_text
from medconv.utils.logging import log_into
from medconv.utils.signals import RunInterrupted

log = logging.getLogger(__name__)
# What may change when a run is continued: none of it changes what is trained.
FREE = (
    *(
        "run.",
        "logger.",
        "callbacks.",
        "data.cache_dir",
        "data.num_workers",
        "data.prefetch_factor",
        "data.persistent_workers",
    ),
    *(
        "perf.timeout_seconds",
        "data.prepare_workers",
        "trainer.enable_progress_bar",
        "trainer.log_every_n_steps",
    ),
    *("derived.monitor", "derived.stem", "derived.num_train_cases"),  # which other facts decide
)


def is_rank_zero() -> bool:
    """Whether this process writes: the first of the run, however it was launched; known before `fit` as
    well.
    """
    return cluster.is_first()


@dataclass
class RunDir:
    """One run's folder. Only rank 0 writes to it.

    Args: resume: `auto` continues from `checkpoints/last.ckpt` where there is one, `never` moves an old run
        aside, anything else is the checkpoint to continue from. A damaged `last.ckpt` gives way to the one
        before it.
    """

    path: Path
    resume: str = "auto"
    begun: float = field(default_factory=time.monotonic)
    _found: tuple[Path | None, dict[str, int]] | None = (
        None  # what to continue from, and how long its curves were
    )
    _lock: IO[bytes] | None = None

    @classmethod
    def of(cls, config: DictConfig, choices: Mapping[str, str]) -> RunDir:
        """The folder that a config means: `run.dir`, else `runs/<run.name>`, else a name made of its main
        choices.
        """
        if config.run.resume not in ("auto", "never") and not Path(config.run.resume).is_file():
            raise ConfigError(
                f"run.resume must be auto, never or a checkpoint, got {config.run.resume}: no such file"
            )
        name = config.run.name or default_name(config, choices)
        folder = cls(Path(config.run.dir) if config.run.dir else Path("runs") / name, config.run.resume)
        if cluster.restarted() and folder.has_own() and folder.summary().get("job") == cluster.job():
            folder.resume = (
                "auto"  # a job that begins anew, or at another run's checkpoint, at each restart never ends
            )
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

    def finished(self, values: dict[str, Any]) -> bool:
        """Whether this very run has been trained to its end here.

        Raises: ConfigError: what was trained here had another config; the message shows the difference.
        """
        if self.resume == "never" or not self.has_own():
            return False
        self._need_same(self._config(), values)
        return self.resume == "auto" and self.summary().get("status") == "done"

    def begin(self, values: dict[str, Any]) -> None:
        """Make the folder and write `config.yaml`. Curves are cut back to the checkpoint to go on from, if
        there is one.

        Raises: ConfigError: another process is at work there; until `close`, this one is.
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
            shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        elif source == self.previous and self.last.is_file():  # or it would become the one before the next
            self.last.replace(self.last.with_name("damaged.ckpt"))
        log_rewind.rewind(self.path, self._found[1] if self._found else {})
        for partial in self.checkpoints.glob(".*.ckpt"):  # what a killed process was writing
            partial.unlink(missing_ok=True)
        write_text(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(values)))
        log_into(self.path / "train.log")

    def _claim(self) -> None:
        """By a lock of the system's, which ends with the process, however that ends; loader workers do not
        share it.
        """
        self.close()
        self._lock = (self.path / ".lock").open("ab")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise ConfigError(
                    f"{self.path}: another process is training there; wait for its end, or choose another "
                    "run.name"
                ) from error
            log.debug("%s: not known whether another process is at work there (%s)", self.path, error)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def resume_from(self) -> Path | None:
        """The checkpoint to continue from, read once and found to be whole; None for a new run.

        Raises: ValueError: there is none that is whole.
        """
        if self._found is None:
            self._found = self._find()
        return self._found[0]

    def _find(self) -> tuple[Path | None, dict[str, int]]:
        if self.resume == "never" or (self.resume == "auto" and not self.has_own()):
            return None, {}
        if self.resume != "auto":
            path = Path(self.resume)
            own = path.resolve().parent == self.checkpoints.resolve()
            return path, checkpoint_io.read(path).get("curves", {}) if own else {}
        try:
            return self.last, checkpoint_io.read(self.last).get("curves", {})
        except ValueError as error:
            if not self.previous.is_file():
                raise ConfigError(
                    f"{error}; there is none before it, run.resume=never begins anew"
                ) from error
            log.warning("%s; going on from the one before, %s", error, self.previous)
        return self.previous, checkpoint_io.read(self.previous).get("curves", {})

    def has_own(self) -> bool:
        """Whether a run has left a checkpoint here."""
        return self.last.is_file() or self.previous.is_file()

    def _config(self) -> dict[str, Any]:
        """What the run in this folder was begun with. Raises: ConfigError: missing, empty or damaged."""
        path = self.path / "config.yaml"
        try:
            content = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else None
        except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
            content, reason = None, f"damaged ({' '.join(str(error).split())})"
        else:
            reason = "empty, or no config" if path.is_file() else "missing"
        if not isinstance(content, dict) or not isinstance(content.get("derived"), dict):
            raise ConfigError(
                f"{path}: {reason}; the run in this folder cannot go on without it. Its checkpoints are "
                f"whole: run.resume={self.last} with another run.name goes on from there, run.resume=never "
                "begins anew"
            )
        return content  # type: ignore[return-value]

    def planned_memory(self) -> float | None:
        """GB that the run to be continued was planned for, so that another machine keeps its plan; None
        for a new run.
        """
        source = self.resume_from()
        if source is None:
            return None
        if self.resume == "auto":
            return self._config()["derived"].get("memory_gb")
        return checkpoint_io.read(source)["medconv"]["config"]["derived"].get("memory_gb")

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says; nothing where there is none. Raises: ValueError: it is damaged, or
        none of medconv's.
        """
        path = self.path / "summary.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from error
        if not _is_intact(content):
            raise ValueError(
                f"{path}: not what medconv writes there, an object with a row of Dice per class for each case"
            )
        return content

    def write_summary(self, **values: Any) -> None:
        if is_rank_zero():
            known = {**_undefined(), **self.summary(), **values}
            write_text(self.path / "summary.json", json.dumps(known, indent=2) + "\n")

    @contextmanager
    def recording(self, trainer: Any, profiler: Any) -> Iterator[None]:
        """Keep `summary.json` true while the block trains, also when it ends by an exception."""
        self.write_summary(status="running", **run_metadata.of(trainer))
        try:
            yield
        except BaseException as error:
            if (
                isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None
            ):  # TensorBoard's thread's
                error.filename = str(self.path)
            with suppress(OSError):  # a disk that is full is said once
                self._conclude(_ended(error), trainer, profiler)
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
        """Of the best checkpoint, from what it says of itself."""
        if not (is_rank_zero() and self.best.is_file()):
            return {}
        try:
            record = checkpoint_io.read(self.best)["medconv"]
        except ValueError as error:
            log.warning("%s; summary.json has no scores of it", error)
            return {}
        return _scores(record)

    def _need_same(self, known: Any, values: dict[str, Any]) -> None:
        old, new = flatten(known), flatten(values)
        changed = [k for k in sorted({*old, *new}) if old.get(k) != new.get(k) and not k.startswith(FREE)]
        if changed:
            lines = "\n".join(f"  {k}: {old.get(k)} there, {new.get(k)} now" for k in changed)
            raise ConfigError(
                f"{self.path} holds a run of another config; choose another run.name, or "
                f"run.resume=never\n{lines}"
            )


def _ended(error: BaseException) -> str:
    """The status of a run that an exception ended."""
    if isinstance(error, (SIGTERMException, cluster.PeerLostError)):
        return "interrupted" if isinstance(error, RunInterrupted) and error.by_hand else "preempted"
    return "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"


def default_name(config: DictConfig, choices: Mapping[str, str]) -> str:
    """Main choices and a hash of the whole config: the same command finds its run again, another one its
    own.
    """
    values: Any = OmegaConf.to_container(config, resolve=False)
    content = {key: value for key, value in values.items() if key not in ("run", "derived")}
    words = [choices.get(group, "custom") for group in ("data", "model", "conv")]
    return "-".join([*words, f"fold{config.data.fold}", short_hash(content)])


def short_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _scores(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a checkpoint's record, as they are logged, with the row of each case."""
    rows = record["validation"]
    if record.get("image_targets") is not None:
        return {
            **_of_whole_images(ImageLevelTargets.from_plain(record["image_targets"]), rows),
            "val/cases": rows,
        }
    per_class = mean_per_class(list(rows.values()))
    return {"val/dice": mean(per_class), "val/dice_per_class": per_class, "val/cases": rows}


def _undefined() -> dict[str, Any]:
    keys = (
        "val/dice",
        "val/dice_per_class",
        "steps",
        "wall_seconds",
        "samples_per_second",
        "data_wait_share",
    )
    return dict.fromkeys(
        (
            *keys,
            "step_shares",
            "verdict",
            "peak_memory_bytes",
            "status",
            "versions",
            "hardware",
            "git_commit",
            "command",
        )
    )


def _is_intact(content: Any) -> bool:
    """Whether what others rely on is as it was written: the scores, and the same classes in every case."""
    if not isinstance(content, dict):
        return False
    cases, skipped = (
        {} if content.get(key) is None else content[key] for key in ("val/cases", "skipped_cases")
    )
    if not isinstance(cases, dict) or not isinstance(skipped, dict):
        return False
    if (
        not all(isinstance(row, dict) for row in cases.values())
        or len({tuple(row) for row in cases.values()}) > 1
    ):
        return False
    rows = [value for row in cases.values() for value in row.values()]
    of_whole = [
        value for row in rows if isinstance(row, list) for value in row
    ]  # outputs and truth of whole images
    numbers = [content.get("val/dice"), *of_whole, *(value for value in rows if not isinstance(value, list))]
    return all(number is None or type(number) in (int, float) for number in numbers)


def _of_whole_images(image_targets: ImageLevelTargets, rows: dict[str, Any]) -> dict[str, Any]:
    """The scores over all cases, as they are logged."""
    if not rows:
        return {}
    return {f"val/{name}": value for name, value in image_level.measure(image_targets, *arrays(rows)).items()}
