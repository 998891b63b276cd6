"""What a resumed run continues: its checkpoint, the sizes of its logs, and its earlier config."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yaml import AliasEvent, SafeLoader, YAMLError, parse

from medconv.config import ConfigError
from medconv.config.yaml_text import from_yaml
from medconv.training.checkpoint import BEST, LAST, PREVIOUS
from medconv.utils import checkpoint_io

log = logging.getLogger(__name__)
_MAX_BYTES = 16 * 2**20  # of a config; ours have some kilobytes, and a few megabytes with a key for each case


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
    _check_no_aliases(text)
    return text


def _check_no_aliases(text: str) -> None:
    """Raises: ValueError: YAML with aliases, of which a few lines can stand for billions of values."""
    if any(isinstance(event, AliasEvent) for event in parse(text, Loader=SafeLoader)):
        raise ValueError("it has YAML aliases, which medconv does not write")
