"""Messages of all commands: how errors are worded, and where log messages go."""

import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TextIO

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from medconv.utils.atomic_io import DISK_ERRORS

log = logging.getLogger("medconv")
_LIGHTNING_LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric")
_PROFILERS = "lightning.pytorch.profilers"  # the table of trainer.profiler=simple is one message
_OUR_LOGGERS = ("medconv", *_LIGHTNING_LOGGERS, _PROFILERS)
_NEVER = logging.CRITICAL + 1
# Keeps the messages until `log_into` names a file.
_early = MemoryHandler(capacity=100_000, flushLevel=_NEVER, flushOnClose=False)
_KEY_PREFIX = "full_key: "
_INTERNAL_PREFIXES = ("full_key:", "object_type=", "reference_type=")
_UNPRINTABLE = re.compile(r"[^\n\t -~\xa0-\ud7ff\ue000-\U0010ffff]")
# About what is done on purpose or cannot be changed.
_IGNORED_WARNINGS = (
    ".*does not have many workers.*",
    # A machine may have Slurm and not use it; `utils.cluster` finds out what started the processes.
    ".*`srun` command is available on your system but is not used.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*The number of training batches .* is smaller than the logging interval.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    # Frozen norms are in eval mode.
    ".*module\\(s\\) in eval mode at the start of training.*",
    ".*WeightAveraging callback with a model that overrides the configure_model.*",
    # With test=true.
    ".*WeightAveraging callback, but loading a checkpoint outside.*",
    # Of 1x1 kernels, whose strides say nothing.
    ".*Grad strides do not match bucket view strides.*",
    ".*You called `self.log\\('.*', ..., rank_zero_only=True\\)`.*",
    ".*It is recommended to use `self.log\\(.*sync_dist=True\\)`.*",
)


def message(error: BaseException) -> str:
    """The text of an error for users. Errors of OmegaConf and Hydra begin with the key, without types."""
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return str(error).strip() or type(error).__name__
    lines = [line.strip() for line in str(error).strip().splitlines()]
    keys = [line.removeprefix(_KEY_PREFIX) for line in lines if line.startswith(_KEY_PREFIX)]
    # Hydra's search path follows the list of available options.
    if "Config search path:" in lines:
        lines = lines[: lines.index("Config search path:")]
    useful_lines = [line for line in lines if line and not line.startswith(_INTERNAL_PREFIXES)]
    text = " ".join(useful_lines)
    if "is not a ListConfig" in text:
        text = "expected a list, such as [1,2]"
    return f"{keys[0]}: {text}" if keys and keys[0] else text


def shown(text: str) -> str:
    """A text with control and unprintable characters escaped: names in it may come from files."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def some(items: Sequence[str], max_items: int = 5) -> str:
    """The first items, and how many more there are."""
    text = ", ".join(items[:max_items])
    if len(items) > max_items:
        text += f" and {len(items) - max_items} more"
    return text


def score_text(score: float | None) -> str:
    """A score in a table; dashes if it is undefined."""
    return "  -   " if score is None else f"{score:.4f}"


def size_text(sizes: Iterable[float], digits: int = 6) -> str:
    """Sizes along axes with so many significant digits, such as `0.5 x 0.5 x 7.5`."""
    return " x ".join(f"{size:.{digits}g}" for size in sizes)


def start_logging(rank_zero: bool = True) -> None:
    """Messages go to standard output on the first rank; other ranks print only errors, to standard error."""
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    log.setLevel(logging.DEBUG)
    console = _Console(rank_zero)
    console.setLevel(logging.INFO if rank_zero else logging.ERROR)
    console.setFormatter(_Plain())
    _early.setTarget(None)
    _early.flushLevel = _NEVER
    root.handlers[:] = [console]
    if rank_zero:
        root.addHandler(_early)
    route_lightning()
    logging.captureWarnings(True)
    threading.excepthook = _on_thread_error
    if not rank_zero:
        warnings.simplefilter("ignore")
    for pattern in _IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", pattern)


@contextmanager
def logging_of_a_call(of_a_later_run: bool = False) -> Iterator[None]:
    """Inside, messages go where `start_logging` sends them; afterwards logging is as it was before.

    For functions that a program or notebook calls, whose logging is its own.

    Args: of_a_later_run: its messages also go into the log of the run that begins next.
    """
    loggers = [logging.getLogger(name) for name in ("", *_OUR_LOGGERS)]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    excepthook = threading.excepthook
    of_earlier_calls = _early.buffer[:]
    with warnings.catch_warnings():
        # A function of `logging` is there where the program has captured warnings itself.
        is_captured = warnings.showwarning.__module__ == "logging"
        start_logging()
        try:
            yield
        finally:
            for logger, handlers, level, propagate in before:
                logger.handlers[:] = handlers
                logger.setLevel(level)
                logger.propagate = propagate
            threading.excepthook = excepthook
            if not of_a_later_run:  # a run has written what came before into its log
                _early.buffer[:] = [] if _early.target is not None else of_earlier_calls
            if not is_captured:
                logging.captureWarnings(False)


def log_into(path: Path) -> None:
    """Write all messages since `start_logging`, and all later ones, to this file."""
    file = _LogFile(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _early.setTarget(file)
    _early.flush()
    # From now on each message is passed on at once.
    _early.flushLevel = logging.NOTSET


def route_lightning() -> None:
    """Lightning's messages go where ours go: warnings and errors, and the results of its profilers.

    Its import adds handlers of its own, so this is to be called after it, too.
    """
    for name in _LIGHTNING_LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger(_PROFILERS).setLevel(logging.INFO)


def _on_thread_error(args: threading.ExceptHookArgs) -> None:
    """No traceback for a full or failed disk or a deleted folder: the main thread reports the same error."""
    is_disk_error = isinstance(args.exc_value, OSError) and args.exc_value.errno in DISK_ERRORS
    if not is_disk_error:
        threading.__excepthook__(args)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback for each message on a full disk: whatever needs the disk reports it."""


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to where `sys.stdout` or `sys.stderr` leads now: a progress bar prints messages above itself."""

    def __init__(self, standard_output: bool) -> None:
        # Not that of `StreamHandler`, which would set `stream`.
        logging.Handler.__init__(self)
        self._standard_output = standard_output

    @property
    def stream(self) -> TextIO:
        return sys.stdout if self._standard_output else sys.stderr


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = shown(record.getMessage())
        if record.levelno < logging.WARNING:
            return text
        return f"{record.levelname.lower()}: {text}"
