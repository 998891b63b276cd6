"""Predict many cases into an output folder: one is loaded while one is predicted and one is written.

Threads, not processes: unpacking, matrix products, the network and writing all release Python's lock (GIL).
A case is in memory from the start of its loading to the end of its writing: at most `workers + 2` cases.
"""

import logging
import re
import shutil
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from threadpoolctl import threadpool_limits

import medconv
from medconv import doors
from medconv.data.case import Case, Grid
from medconv.data.datasets.tables import PATH_COLUMN
from medconv.data.io.grids import canonical_shape, canonical_spacing
from medconv.data.io.images import shape_and_affine
from medconv.data.io.nifti import FITS_ANYWHERE, LOADING, check_memory
from medconv.data.io.raster import are_picture_channels
from medconv.data.per_case import source_spacing
from medconv.data.preprocessing.preprocess import resampled_shape
from medconv.inference.load import LoadedModel
from medconv.inference.output import Claim, Output, OutputDir
from medconv.inference.predictor import Predictor
from medconv.inference.prepare import Input, is_plausible
from medconv.inference.sliding_window import slab_axis, takes_half
from medconv.utils import signals
from medconv.utils.atomic_io import NO_ROOM
from medconv.utils.cluster import local_rank
from medconv.utils.digests import digest
from medconv.utils.errors import ArgumentError, first_line, with_class
from medconv.utils.hardware import keep_freed_memory, out_of_memory, total_memory
from medconv.utils.logging import size_text, some
from medconv.utils.progress import counting

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Loaded = TypeVar("Loaded")
Answer = TypeVar("Answer")
# Cases with their scores.
Predicted = list[tuple[Case, Any]]
# Of a checkpoint's hash, in the manifest.
_DIGITS = 16
_LABEL = 4  # bytes a voxel: the label map on the content's grid and on the image's
# Bytes a voxel while probabilities are written: the sum over classes, a channel on the content's grid and on
# the image's.
_PROBABILITIES = 12
# Planes in work, in lengths of a window: its own, those not asked for yet, and of a row that a batch begins.
_PLANES = 1.4
_USABLE = 0.8  # share of the machine's memory
_LOOKED_AT = 8  # cases; headers of thousands would take minutes
_WORTH_SAYING = 2**30  # bytes


def predict(
    predictor: Predictor, cases: Sequence[Case], output: Output, overwrite: bool = False, workers: int = 1
) -> None:
    """Predict each case that is not done yet and that no other process works on.

    Cases that fail do not stop the others, and are named at the end.

    Args:
        output: as `output_in` makes it for this predictor.
        overwrite: results of these cases are replaced.
        workers: batches of cases that are loaded at once; fewer if memory would run out.
    Raises:
        ValueError: `output` holds other results, cases failed, or the disk is full.
    """
    # The next case needs the memory that this one frees.
    keep_freed_memory()
    # Whole images take little memory.
    if predictor.targets.per_voxel:
        workers = fitting_workers(
            cases,
            predictor.members,
            workers,
            saves_probabilities=output.logit_folder is not None,
            only_labels=not any(extra.needs_logits for extra in predictor.extras),
        )
    stages = _Stages(predictor, output)
    # One thread per matrix product in NumPy and SciPy: `workers` of them load beside the network.
    limits = threadpool_limits(1, user_api="blas")
    progress = counting("predicting", len(cases))
    with ExitStack() as stack:
        stack.callback(stages.repeat_warnings)  # also of a run that was stopped
        for context in (signals.raising(), output.open(cases, overwrite), limits, progress):
            stack.enter_context(context)
        claims = output.claims(cases)
        size = predictor.forward.batch_size
        # Claimed as late as possible, since other processes may take them.
        batches = iter(lambda: list(islice(claims, size)), [])
        ended = 0
        for batch in pipelined(batches, stages.load, stages.predict, stages.write, workers):
            for claim in batch:
                claim.release()
            ended += len(batch)
            progress.update(progress.task_ids[0], completed=ended + len(output.skipped))
    # What was done, by whom, and what failed.
    num_before, num_claimed = len(output.skipped), len(output.claimed_by_others)
    num_now = len(cases) - num_claimed - num_before - len(stages.failed)
    log.info(
        "%d of %d predictions are in %s: %d new, %d already there",
        num_before + num_now,
        len(cases),
        output.target,
        num_now,
        num_before,
    )
    if num_claimed:
        log.info(
            "other processes still work on %d cases, such as %s", num_claimed, output.claimed_by_others[0]
        )
    if stages.failed:
        in_order = {case.id: stages.failed[case.id] for case in cases if case.id in stages.failed}
        raise ValueError(failures(in_order, len(cases)))


@dataclass
class _Stages:
    """What is done to a batch of cases, one stage after the other; each runs in a thread of its own.

    Args:
        failed: case id to why it failed.
        warned: a warning to the cases that it is about; said once, and at the end of how many more.
    """

    predictor: Predictor
    output: Output
    failed: dict[str, str] = field(default_factory=dict)
    warned: dict[str, list[str]] = field(default_factory=dict)

    def repeat_warnings(self) -> None:
        """Of how many more cases each warning was."""
        for warning, (_, *more) in self.warned.items():
            if more:
                cases = f"{len(more)} more case{'s' * (len(more) > 1)}"
                log.warning("%s (%s): %s", cases, some(more, 20), warning)

    def load(self, batch: Sequence[Claim]) -> list[Input]:
        inputs: list[Input] = []
        for claim in batch:
            try:
                case_input = self.predictor.read(claim.case)
            # It concerns this case alone.
            except Exception as error:
                self.failed[claim.case.id] = why_failed(error)
                continue
            if case_input.warning:
                alike = self.warned.setdefault(case_input.warning, [])
                alike.append(claim.case.id)  # in threads; appending is atomic
                if alike[0] == claim.case.id:
                    log.warning("case %s: %s", claim.case.id, case_input.warning)
            inputs.append(case_input)
        return inputs

    def predict(self, inputs: Sequence[Input]) -> Predicted:
        """A batch at once; if that fails, case by case, so that only the failing case is lost.

        Raises: ValueError: the disk is full.
        """
        if not inputs:
            return []
        try:
            scores = self.predictor.scores(inputs, logit_folder=self.output.logit_folder)
            return [(case_input.case, each) for case_input, each in zip(inputs, scores, strict=True)]
        # No room for the logits; all further cases would fail alike.
        except OSError as error:
            raise unwritable(self.output.path, inputs[0].case.id, error) from error
        except Exception as error:
            if len(inputs) == 1:
                self.failed[inputs[0].case.id] = why_failed(error)
                return []
        # Outside of `except`: the error's frames hold the batch in memory.
        predicted: Predicted = []
        for case_input in inputs:
            predicted += self.predict([case_input])
        return predicted

    def write(self, _: Sequence[Claim], predicted: Predicted) -> None:
        """Raises: ValueError: the disk is full, or no permission."""
        for case, scores in predicted:
            try:
                self.output.check_unchanged(case)
                self.output.write(self.predictor, case, scores)
            except OSError as error:
                raise unwritable(self.output.path, case.id, error) from error
            # It concerns this case alone.
            except Exception as error:
                self.failed[case.id] = why_failed(error)


def output_in(folder: Path, predictor: Predictor, *, probabilities: bool = False) -> Output:
    """The output folder for this predictor, and for what its extras write.

    Args: probabilities: of label maps: written, too.
    """
    members, targets = predictor.members, predictor.targets
    own_output = targets.family.own("output")
    # What determines the predictions; with other settings, results in the folder do not count as done.
    settings: dict[str, Any] = {
        "checkpoints": [digest(member.path)[:_DIGITS] for member in members if member.path]
    }
    if targets.per_voxel:
        settings["overlap"] = [member.window.overlap for member in members]
    settings["mirror_axes"] = [list(member.window.mirror_axes) for member in members]
    if own_output is None:
        settings["postprocess"] = None  # label maps are not changed, unless an extra says how
    for extra in predictor.extras:
        settings |= extra.settings()
    if members[0].source_spacing_mm:
        settings["source_spacing_mm"] = members[0].source_spacing_mm
    elif are_picture_channels(members[0].modalities) and not members[0].takes_pixels:
        settings["pixels"] = "of the size that their headers say"
    # What else a reader wants to know; packages of the user's own are for `medconv evaluate`.
    paths = [str(member.path) for member in members]
    versions = {name: version(name) for name in ("torch", "monai")}
    packages = doors.named_packages
    path_column = members[0].path_column
    about = {
        "checkpoint": paths[0],
        "checkpoints": paths,
        "class_names": list(predictor.class_names),
        "targets": targets.plain(),
        "train_cases": sorted(predictor.train_cases),
        "versions": {"medconv": medconv.__version__, **versions},
        **({"packages": list(packages)} if packages else {}),
        **({"path_column": path_column} if path_column != PATH_COLUMN else {}),
    }
    if own_output:
        output: Output = own_output(folder, targets, settings, about)
        return output
    return OutputDir(folder, settings, about, probabilities)


def usable_device(name: str | None) -> str:
    """The device with this name; None: a GPU if there is one, else the CPU.

    Processes that torchrun or srun started take different GPUs.

    Raises:
        ArgumentError: this machine has no such device.
    """
    device = name
    if device is None:
        device = "cpu"
        if torch.cuda.is_available():
            device = f"cuda:{local_rank() % torch.cuda.device_count()}"
    try:
        torch.zeros(1, device=device)
    # AssertionError: torch was built without it.
    except (RuntimeError, AssertionError) as error:
        problem = f" {device}: cannot be used here ({first_line(error)})"
        raise ArgumentError("device", problem) from error
    return device


def unwritable(path: Path, case_id: str, error: OSError) -> ValueError:
    """The error to raise when a result cannot be written, as all further ones could not.

    Args:
        path: the output folder.
    """
    if error.errno not in NO_ROOM:
        return ValueError(f"case {case_id}: cannot write to {path} ({error.strerror or error})")
    free_mb = shutil.disk_usage(path).free / 1e6
    return ValueError(
        f"case {case_id}: no room in {path} ({error.strerror}), {free_mb:.1f} MB are free. Finished cases "
        "are kept; free some space and rerun the command to resume"
    )


def failures(failed: Mapping[str, str], num_cases: int) -> str:
    """Which cases failed, by their reasons. Args: failed: case id to reason."""
    # Reasons name the file of a case, of which the first stands for all
    first_reason: dict[str, str] = {}
    cases_by_reason: dict[str, list[str]] = {}
    for case_id, why in failed.items():
        alike = re.sub(rf"\S*(?<!\w){re.escape(case_id)}(?!\w)\S*", "", why)
        first_reason.setdefault(alike, why)
        cases_by_reason.setdefault(alike, []).append(case_id)
    lines = "\n".join(
        f"  case{'s' * (len(cases) > 1)} {some(cases, 20)}: {first_reason[alike]}"
        for alike, cases in cases_by_reason.items()
    )
    return f"{len(failed)} of {num_cases} cases could not be predicted\n{lines}"


def why_failed(error: Exception) -> str:
    """Why a case failed, on one line; the traceback of an unexpected error goes to the log."""
    if isinstance(error, ValueError):
        return str(error)
    text = with_class(error)
    if out_of_memory(error):
        return f"out of memory ({text}); try sw_batch_size=1, the CPU as the device, or fewer workers"
    log.error("%s", "".join(traceback.format_exception(error)))
    return f"{text} (a bug in medconv, please report it with the lines above)"


def pipelined(
    items: Iterable[Item],
    load: Callable[[Item], Loaded],
    predict: Callable[[Loaded], Answer],
    write: Callable[[Item, Answer], None],
    workers: int = 1,
) -> Iterator[Item]:
    """Yields each item when it is finished; an error ends the stream.

    Args:
        items: iterated in the caller's thread, as late as possible.
        load: runs in one of the loading threads.
        predict: runs in the caller's thread.
        write: runs in the writing thread.
        workers: items that are loaded at once.
    """
    upcoming = iter(items)
    loading: deque[tuple[Item, Future[Loaded]]] = deque()
    writing: deque[tuple[Item, Future[None]]] = deque()
    with ExitStack() as stack:
        loaders = ThreadPoolExecutor(workers)
        # After an error, what has not begun is not loaded.
        stack.callback(loaders.shutdown, cancel_futures=True)
        writer = stack.enter_context(ThreadPoolExecutor(1))
        loading.extend((item, loaders.submit(load, item)) for item in islice(upcoming, workers))
        while loading:
            wait([loading[0][1]])
            # One more than workers, beside the one that is loaded.
            new = islice(upcoming, workers + 1 - len(loading))
            loading.extend((item, loaders.submit(load, item)) for item in new)
            item, loaded = loading.popleft()
            predicted = predict(loaded.result())
            # The future holds the case, which should not stay in memory.
            del loaded
            # The previous item was written while this one was predicted.
            if writing:
                item_before, written = writing.popleft()
                written.result()
                yield item_before
            writing.append((item, writer.submit(write, item, predicted)))
            del predicted
        for item, written in writing:
            written.result()
            yield item


@dataclass(frozen=True)
class Need:
    """Bytes of a case: while it is loaded, while it is predicted, and while its probabilities are written."""

    shape: tuple[int, ...]
    loading: float
    predicting: float
    writing: float = 0.0

    def total(self, workers: int) -> float:
        """The memory of a case that is predicted, one that is written and one that waits, beside those that
        are being loaded.
        """
        return self.predicting + self.writing + (workers + 1) * self.loading


def fitting_workers(
    cases: Sequence[Case],
    members: Sequence[LoadedModel],
    workers: int,
    available: float | None = None,
    saves_probabilities: bool = False,
    only_labels: bool = True,
) -> int:
    """Cases to load at once: `workers`, or fewer if memory would run out; a line says what it takes.

    Args:
        members: networks for label maps; others take little.
        available: bytes; None: of this machine, or its container.
        saves_probabilities: all logits of a case are kept, in a file.
        only_labels: nothing but label maps and probabilities follows from the logits.
    """
    only_labels = only_labels and not saves_probabilities
    needs = [need for case in cases[:_LOOKED_AT] if (need := _need(case, members, only_labels))]
    if not needs:
        return workers
    if saves_probabilities:
        needs = [replace(need, writing=_PROBABILITIES * prod(need.shape)) for need in needs]
    largest = max(needs, key=lambda need: need.total(workers))
    if available is None:
        if largest.total(workers) < FITS_ANYWHERE:
            return workers
        available = total_memory()
    usable = _USABLE * available
    # Slower, rather than killed by the system.
    fitting = workers
    while fitting > 1 and largest.total(fitting) > usable:
        fitting -= 1
    if fitting < workers or largest.total(fitting) > _WORTH_SAYING:
        fewer = f", instead of {workers}" if fitting < workers else ""
        too_large = f"; this machine has {available / 2**30:.1f} GB, and may kill the process"
        is_too_large = largest.total(fitting) > usable
        log.log(
            logging.WARNING if is_too_large else logging.INFO,
            "memory: about %.1f GB for %s voxels, the largest of the first %d cases; %d loaded at once%s%s",
            largest.total(fitting) / 2**30,
            size_text(largest.shape),
            len(needs),
            fitting,
            fewer,
            too_large if is_too_large else "",
        )
    return fitting


def _need(case: Case, members: Sequence[LoadedModel], only_labels: bool) -> Need | None:
    """None: the header cannot be read, or is refused, which prediction will say."""
    try:
        shape, affine = shape_and_affine(case.images[0])
        check_memory(case.images[0], shape)
        grid = Grid.of(shape, affine)
        grid = grid.with_spacing_mm(source_spacing(members[0].source_spacing_mm, case.id))
    except (ValueError, OSError):
        return None
    spacing_mm = canonical_spacing(grid, members[0].preprocessing.reorients)
    if members[0].source_spacing_mm is None and not is_plausible(spacing_mm, members[0]):
        return None
    voxels = prod(grid.shape)
    loading = LOADING * voxels * len(members[0].modalities)
    # Members with the same preprocessing and windows share a sum.
    sums = list({(str(member.preprocessing), member.window): member for member in members}.values())
    shapes: list[tuple[int, ...]] = []
    for preprocessing in (member.preprocessing for member in sums):
        spacing_mm = canonical_spacing(grid, preprocessing.reorients)
        shape = canonical_shape(grid, preprocessing.reorients)
        shapes.append(resampled_shape(shape, spacing_mm, preprocessing.target_mm(spacing_mm)))
    axis = slab_axis([member.window for member in sums], shapes)
    # The planes that windows still add to.
    logits = 0.0
    for member, shape in zip(sums, shapes, strict=True):
        window_length = 1 if member.window.slice_axis is not None else member.window.patch_size[axis]
        values = min(shape[axis], _PLANES * window_length) * prod(shape) / shape[axis]
        is_half = only_labels and takes_half(member.targets.num_outputs, values)
        logits += (2 if is_half else 4) * member.targets.num_outputs * values
    return Need(grid.shape, loading, logits + _LABEL * voxels)
