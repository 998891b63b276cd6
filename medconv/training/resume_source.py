"""What a resumed run continues: its checkpoint, the sizes of its logs, and its earlier config."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from medconv.config import ConfigError
from medconv.training.checkpoint import LAST, PREVIOUS
from medconv.utils import checkpoint_io

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumeSource:
    """The checkpoint to resume from, which has been read and is not damaged.

    Args:
        checkpoint: None: a new run.
        log_sizes: of the run's logs when the checkpoint was written, as in `log_rewind.measure`; empty if
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
    return ResumeSource(previous, _log_sizes(previous))


def is_inside(checkpoint: Path, folder: Path) -> bool:
    """Whether a checkpoint is one of those of a folder."""
    return checkpoint.resolve().parent == folder.resolve()


def _log_sizes(checkpoint: Path) -> dict[str, int]:
    """Raises: ValueError: the checkpoint is damaged."""
    sizes: dict[str, int] = checkpoint_io.read(checkpoint).get("curves", {})
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
            content = OmegaConf.to_container(OmegaConf.load(path))
        except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
            problem = f"damaged ({' '.join(str(error).split())})"
    if not isinstance(content, dict) or not isinstance(content.get("derived"), dict):
        raise ConfigError(
            f"{path}: {problem}; the run in this folder cannot resume without it. Its checkpoints are "
            f"intact: run.resume={last} with another run.name resumes from them, run.resume=never "
            "starts a new run"
        )
    return content
