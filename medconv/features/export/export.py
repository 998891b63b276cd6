"""Export a network in a format of the door `EXPORTS`, and compare its logits with the checkpoint's."""

import errno
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from glob import escape
from pathlib import Path

from medconv import doors
from medconv.features.export.graph import MeanNetwork
from medconv.features.export.job import OPSETS, ExportOptions, Format, Job, write_metadata
from medconv.inference.load import LoadedModel, checkpoints_of, load
from medconv.inference.predictor import check_same
from medconv.utils.atomic_io import replacing
from medconv.utils.errors import ArgumentError

log = logging.getLogger(__name__)


def export(source: Path, output: Path, choices: ExportOptions, trusted: Sequence[str] = ()) -> None:
    """Export the network of a checkpoint, compare its logits with the checkpoint's, and write its metadata.

    Args:
        source: the checkpoint, or the folder of a run; of several networks in it, their mean is written.
        output: the file to write; for formats that are one, a new folder.
        choices: how it is written and compared.
        trusted: packages of your own that the network may come from.
    Raises:
        ArgumentError: a format, an output or an opset that cannot be.
        ValueError: a package is missing, it cannot be exported, or its logits differ;
            nothing is written.
    """
    format = _format(choices)
    _check_output(output, format, choices, source)
    model = _loaded(source, format, trusted, plain=True)
    job = Job(model, _loaded(source, format, trusted), output.name, choices)
    format.check(model, output)
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    if format.is_folder:
        with _new_folder(output) as partial:
            format.write(partial, job)
    else:
        with replacing(output, durable=True) as partial:
            metadata = format.write(partial, job)
        if metadata is not None:
            write_metadata(metadata, output)
    for note in format.notes(model, output):
        log.info("%s", note)


def _loaded(source: Path, format: Format, trusted: Sequence[str], plain: bool = False) -> LoadedModel:
    """The network of a checkpoint, or the mean of those of a folder. Raises: ValueError: there is none."""
    models = [load(path, trusted, plain=plain) for path in checkpoints_of(source)]
    first = models[0]
    if len(models) == 1:
        return first
    if not format.takes_mean:
        raise ValueError(
            f"{source}: holds {len(models)} networks, and this format one; onnx, torchscript and pt2 hold "
            "their mean, or name one checkpoint"
        )
    for model in models[1:]:
        check_same(first, model)
        if model.targets != first.targets:  # also what is fitted to the training cases
            raise ValueError(
                f"{model.path}: its targets differ from those of {first.path}, so no mean is exact"
            )
        if model.preprocessing != first.preprocessing or model.window != first.window:
            raise ValueError(f"{model.path}: has another preprocessing or window than {first.path}")
    if not first.targets.mean_of_outputs:
        raise ValueError(
            f"{source}: {first.targets.kind} networks average their answers, not their outputs; "
            "name one checkpoint"
        )
    return replace(first, network=MeanNetwork([model.network for model in models]).eval())


def _format(choices: ExportOptions) -> Format:
    formats = doors.mapping("EXPORTS")
    if choices.format not in formats:
        raise ArgumentError("format", f" must be one of {', '.join(formats)}, got {choices.format}")
    if choices.opset is not None and choices.format != "onnx":
        raise ArgumentError("opset", f" {choices.opset}: is of ONNX, and the format is {choices.format}")
    if choices.opset not in (None, *OPSETS):
        raise ArgumentError("opset", f" must lie between {OPSETS[0]} and {OPSETS[-1]}, got {choices.opset}")
    format: Format = doors.load(formats[choices.format])
    format.check_packages()
    return format


def _check_output(output: Path, format: Format, choices: ExportOptions, source: Path) -> None:
    problem = ""
    nearest = next(path for path in output.absolute().parents if path.exists())
    if not nearest.is_dir():
        problem = f"{nearest} is not a folder"
    elif format.is_folder and (output.exists() or output.is_symlink()):
        problem = f"exists already; the format {choices.format} needs a new folder"
    elif output.is_dir():
        problem = "is a folder, expected the name of a file"
    elif output.exists() and source.exists() and output.samefile(source):
        problem = "is the checkpoint itself, expected another name"
    if problem:
        raise ArgumentError("output", f" {output}: {problem}")


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """As `atomic_io.replacing`, for a folder that does not exist yet.

    Raises: ArgumentError: it exists in the end, and is not empty.
    """
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    for left in _left_behind(path):
        log.warning("%s: left by an export that was killed, if none is running on another machine", left)
    try:
        partial.mkdir()
        yield partial
        try:
            partial.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise ArgumentError("output", f" {path}: exists by now; another export has written it") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _left_behind(path: Path) -> list[Path]:
    """The partial folders of exports to this path that no process of this machine is writing."""
    partials = path.parent.glob(f".*.{escape(path.name)}")
    process_ids = {partial: partial.name.split(".")[1] for partial in partials}
    return [
        partial
        for partial, process_id in process_ids.items()
        if process_id.isdecimal() and not _is_running(int(process_id))
    ]


def _is_running(process_id: int) -> bool:
    """Whether this machine has such a process; on Windows, where a process cannot be asked, it may have."""
    if os.name == "nt":
        return True  # os.kill would end it
    try:
        os.kill(process_id, 0)  # sends nothing
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True
