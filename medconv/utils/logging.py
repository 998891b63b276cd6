"""Messages of all commands: how errors are worded, and where log messages go."""

import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TextIO

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from medconv.utils.atomic_io import NO_ROOM

log = logging.getLogger("medconv")
_NEVER = logging.CRITICAL + 1
_early = MemoryHandler(capacity=100_000, flushLevel=_NEVER, flushOnClose=False)  # until `log_into`


def message(error: BaseException) -> str:
    """The text of an error for users: of OmegaConf's and Hydra's errors the key first, no inner types."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), None)
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return str(error).strip() or type(error).__name__
    if "Config search path:" in lines:  # follows the list of available options
        lines = lines[: lines.index("Config search path:")]
    inner = ("full_key:", "object_type=", "reference_type=")
    useful = " ".join(line for line in lines if line and not line.startswith(inner))
    if "is not a ListConfig" in useful:
        useful = "expected a list, such as [1,2]"
    return f"{key}: {useful}" if key else useful


def shown(text: str) -> str:
    """A text with control and unprintable characters escaped: names in it may come from files."""
    unprintable = r"[^\n\t -~\xa0-\ud7ff\ue000-\U0010ffff]"
    return re.sub(unprintable, lambda match: match[0].encode("unicode_escape").decode(), text)


def some(items: Sequence[str], most: int = 5) -> str:
    """The first `most` items, and how many more there are."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def size_text(numbers: Iterable[float], digits: int = 6) -> str:
    """Sizes along axes with so many significant digits, such as `0.5 x 0.5 x 7.5`."""
    return " x ".join(f"{n:.{digits}g}" for n in numbers)


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
    root.handlers[:] = [console, *([_early] if rank_zero else [])]
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    logging.captureWarnings(True)
    threading.excepthook = _thread_ended
    if not rank_zero:
        warnings.simplefilter("ignore")
    _silence()


def log_into(path: Path) -> None:
    """Write all messages since `start_logging`, and all later ones, to this file."""
    file = _Log(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _early.setTarget(file)
    _early.flush()
    _early.flushLevel = logging.NOTSET


def _thread_ended(args: threading.ExceptHookArgs) -> None:
    """No traceback for a full disk: the main thread reports the same error."""
    if not (isinstance(args.exc_value, OSError) and args.exc_value.errno in NO_ROOM):
        threading.__excepthook__(args)


class _Log(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback for each message on a full disk: whatever needs the disk reports it."""


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to where `sys.stdout` or `sys.stderr` leads now: a progress bar prints messages above itself."""

    def __init__(self, standard_output: bool) -> None:
        logging.Handler.__init__(self)
        self._standard_output = standard_output

    @property
    def stream(self) -> TextIO:
        return sys.stdout if self._standard_output else sys.stderr


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = shown(record.getMessage())
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def _silence() -> None:
    """Ignore library warnings about what is done on purpose or cannot be changed."""
    for pattern in (
        ".*does not have many workers.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*The number of training batches .* is smaller than the logging interval.*",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
        ".*module\\(s\\) in eval mode at the start of training.*",  # frozen norms
        ".*WeightAveraging callback with a model that overrides the configure_model.*",
        ".*WeightAveraging callback, but loading a checkpoint outside.*",  # test=true
        ".*Grad strides do not match bucket view strides.*",  # of 1x1 kernels, whose strides say nothing
        ".*You called `self.log\\('.*', ..., rank_zero_only=True\\)`.*",
        ".*It is recommended to use `self.log\\(.*sync_dist=True\\)`.*",
    ):
        warnings.filterwarnings("ignore", pattern)
