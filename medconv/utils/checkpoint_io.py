"""Read and write checkpoints; only tensors and plain values are ever unpickled."""

import logging
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.serialization import safe_globals

import medconv
from medconv.utils.atomic_io import UNREADABLE

log = logging.getLogger(__name__)

# Classes of NumPy's numbers, by their names before and after NumPy 2.
_NUMPY_CLASSES = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
_NETWORK_PREFIX = "network."  # Lightning's prefix of the network's parameter names


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint of medconv.

    Raises:
        ValueError: it is missing, damaged, holds objects, or is not medconv's.
        OSError: as `unpickled`.
    """
    content: dict[str, Any] = unpickled(path)
    if not is_ours(content):
        raise ValueError(
            f"{path}: not a medconv checkpoint, the keys `medconv` and `state_dict` are not in it"
        )
    metadata = content["medconv"]
    version = metadata.get("version") if isinstance(metadata, dict) else None
    if isinstance(version, str) and _numbers(version) > _numbers(medconv.__version__):
        _warn_of_later(version[:20])
    return content


def _numbers(version: str) -> list[int]:
    """Such as [0, 12, 1] of 0.12.1rc2."""
    return [int(number) for number in re.findall(r"\d{1,9}", version)[:3]]


@cache
def _warn_of_later(version: str) -> None:
    """Once for a process, which may read several files of a run."""
    log.warning(
        "a checkpoint was written by medconv %s, this is %s, which does not know what is new there",
        version,
        medconv.__version__,
    )


def is_ours(content: Any) -> bool:
    return isinstance(content, dict) and {"medconv", "state_dict"} <= set(content)


def save(content: Any, file: BinaryIO) -> None:
    """As `torch.save`.

    Raises:
        OSError: it cannot be written; torch raises a RuntimeError without the reason.
    """
    recording = _Recording(file)
    try:
        torch.save(content, recording)  # type: ignore[arg-type]
    except Exception:
        if recording.error is not None:
            raise recording.error from None
        raise


class _Recording:
    """A file that remembers the OSError of a failed write."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return int(self._file.write(data))
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


class _Inert:
    """Takes the place of a NumPy object whose content is not looked at."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


def unpickled(path: Path, inert: bool = False) -> Any:
    """The content of any file of `torch.save`.

    Args:
        inert: allow NumPy's numbers; they become objects without a value, and NumPy is not called.

    Raises:
        ValueError: missing, damaged, or holding objects.
        OSError: it could not be read, as from a failed disk, and may be whole.
    """
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, expected a checkpoint, such as RUN/checkpoints/best.ckpt")
    if not path.is_file():
        raise ValueError(f"{path}: no such checkpoint")
    allowed_classes: list[Any] = [(_Inert, name) for name in _NUMPY_CLASSES] if inert else []
    content = None
    try:
        problem = _archive_problem(path)
        if problem is None:
            with safe_globals(allowed_classes):
                content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: refused, it holds more than tensors and plain values, or is no checkpoint"
        ) from error
    except Exception as error:  # unpickling a made-up file may raise anything
        if isinstance(error, OSError) and error.errno in UNREADABLE:
            error.filename = str(path)
            raise
        raise ValueError(f"{path}: damaged or not a checkpoint ({type(error).__name__})") from error
    if problem is not None:
        raise ValueError(f"{path}: {problem}")
    return content


def _archive_problem(path: Path) -> str | None:
    """Why an archive is not as torch writes it; None: it is, or the file is no archive."""
    if not zipfile.is_zipfile(path):  # torch before 1.6 wrote none
        return None
    with zipfile.ZipFile(path) as archive:
        total = sum(record.file_size for record in archive.infolist())
        # Compressed, or with parts that overlap
        if total > path.stat().st_size:
            return (
                f"refused, {total / 1e9:.1f} GB are packed in it; expected a checkpoint that is not "
                "compressed, as medconv and torch write it"
            )
        # torch does not verify checksums
        damaged_record = archive.testzip()
    return damaged_record and f"damaged, {damaged_record} in it does not match its checksum"


def load_weights(network: nn.Module, content: dict[str, Any], path: Path) -> None:
    """Load a checkpoint's weights into a network.

    Raises:
        ValueError: they do not fit.
    """
    weights = {}
    for name, tensor in content["state_dict"].items():
        if name.startswith(_NETWORK_PREFIX):
            weights[name.removeprefix(_NETWORK_PREFIX)] = tensor
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        # torch's first line names only the class; the next ones name parameters.
        reasons = [line.strip() for line in str(error).splitlines()[1:4]]
        raise ValueError(f"{path}: its weights do not fit this network: {'; '.join(reasons)}") from error


def output_names(derived: Mapping[str, Any]) -> list[str]:
    """The names of the outputs without the background; empty if `derived` has none."""
    targets = derived.get("targets")
    if not isinstance(targets, Mapping):
        return []
    of_image = targets.get("of_image")  # of a network with both
    further = list(of_image.get("names") or []) if isinstance(of_image, Mapping) else []
    return [*(targets.get("names") or []), *further]


def channel_order(metadata: Mapping[str, Any], modalities: Sequence[str] | None) -> list[int] | None:
    """Which channel of a trained network each of these is; None: the same order, or other channels.

    Args:
        metadata: of a checkpoint of ours.
        modalities: names of the channels now.
    """
    saved = [str(name).casefold() for name in metadata.get("modalities") or ()]
    current = [name.casefold() for name in modalities or ()]
    if saved == current or sorted(saved) != sorted(current) or len({*current}) < len(current):
        return None
    return [saved.index(name) for name in current]
