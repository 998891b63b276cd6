"""Predict many cases into an output folder: one is loaded while one is predicted and one is written.

Threads, not processes: unpacking, matrix products, the network and writing all release Python's lock (GIL).
A case is in memory from the start of its loading to the end of its writing: at most `workers + 2` cases.
"""

import logging
import shutil
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from threadpoolctl import threadpool_limits

import medconv
from medconv import doors
from medconv.data.case import Case
from medconv.inference.memory import fitting_workers
from medconv.inference.output import Claim, Output, OutputDir
from medconv.inference.predictor import Predictor
from medconv.inference.prepare import Input
from medconv.utils import signals
from medconv.utils.atomic_io import NO_ROOM
from medconv.utils.cluster import local_rank
from medconv.utils.digests import digest
from medconv.utils.errors import ArgumentError, first_line
from medconv.utils.hardware import keep_freed_memory, out_of_memory
from medconv.utils.logging import some
from medconv.utils.progress import counting

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Loaded = TypeVar("Loaded")
Answer = TypeVar("Answer")
# Cases with their scores.
Predicted = list[tuple[Case, Any]]
# Of a checkpoint's hash, in the manifest.
_DIGITS = 16


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
    keep_freed_memory()
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
    with signals.raising(), output.open(cases, overwrite), limits, progress:
        ended = 0
        batches = _batches(output.claims(cases), predictor.forward.batch_size)
        for batch, error in stream(batches, stages.load, stages.predict, stages.write, workers):
            for claim in batch:
                claim.release()
            if error is not None:
                raise error
            ended += len(batch)
            progress.update(progress.task_ids[0], completed=ended + len(output.skipped))
    _report(output, len(cases), len(stages.failed))
    failed = {case.id: stages.failed[case.id] for case in cases if case.id in stages.failed}
    check_all_predicted(failed, len(cases))


@dataclass
class _Stages:
    """What is done to a batch of cases, one stage after the other; each runs in a thread of its own.

    Args:
        failed: case id to why it failed.
    """

    predictor: Predictor
    output: Output
    failed: dict[str, str] = field(default_factory=dict)

    def load(self, batch: Sequence[Claim]) -> list[Input]:
        inputs: list[Input] = []
        for claim in batch:
            try:
                case_input = self.predictor.read(claim.case)
            # It concerns this case alone.
            except Exception as error:
                self.failed[claim.case.id] = reason(error)
                continue
            if case_input.warning:
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
                self.failed[inputs[0].case.id] = reason(error)
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
                self.failed[case.id] = reason(error)


def _batches(claims: Iterable[Claim], size: int) -> Iterator[list[Claim]]:
    claims = iter(claims)
    while batch := list(islice(claims, size)):
        yield batch


def _report(output: Output, num_cases: int, num_failed: int) -> None:
    num_before = len(output.skipped)
    num_claimed = len(output.claimed_by_others)
    num_now = num_cases - num_claimed - num_before - num_failed
    log.info(
        "%d of %d predictions are in %s: %d new, %d already there",
        num_before + num_now,
        num_cases,
        output.target,
        num_now,
        num_before,
    )
    if num_claimed:
        log.info(
            "other processes still work on %d cases, such as %s", num_claimed, output.claimed_by_others[0]
        )


def output_in(folder: Path, predictor: Predictor, *, probabilities: bool = False) -> Output:
    """The output folder for this predictor, and for what its extras write.

    Args: probabilities: of label maps: written, too.
    """
    settings = _settings(predictor)
    about = _about(predictor)
    own_output = predictor.targets.family.own("output")
    if own_output:
        output: Output = own_output(folder, predictor.targets, settings, about)
        return output
    return OutputDir(folder, settings, about, probabilities)


def _settings(predictor: Predictor) -> dict[str, Any]:
    """What determines the predictions; with other settings, results in the folder do not count as done."""
    members = predictor.members
    digests = [digest(member.path)[:_DIGITS] for member in members if member.path]
    settings: dict[str, Any] = {"checkpoints": digests}
    if predictor.targets.per_voxel:
        settings["overlap"] = [member.window.overlap for member in members]
    settings["mirror_axes"] = [list(member.window.mirror_axes) for member in members]
    if predictor.targets.per_voxel:
        settings["postprocess"] = None  # label maps are not changed, unless an extra says how
    for extra in predictor.extras:
        settings |= extra.settings()
    if members[0].source_spacing_mm:
        settings["source_spacing_mm"] = members[0].source_spacing_mm
    return settings


def _about(predictor: Predictor) -> dict[str, Any]:
    paths = [str(member.path) for member in predictor.members]
    versions = {name: version(name) for name in ("torch", "monai")}
    packages = {"packages": list(doors.named_packages())} if doors.named_packages() else {}
    return {
        "checkpoint": paths[0],
        "checkpoints": paths,
        "class_names": list(predictor.class_names),
        "targets": predictor.targets.plain(),
        "train_cases": sorted(predictor.train_cases),
        "versions": {"medconv": medconv.__version__, **versions},
        **packages,  # of the user's own, for `medconv evaluate`
    }


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


def check_all_predicted(failed: Mapping[str, str], num_cases: int) -> None:
    """Args: failed: case id to reason. Raises: ValueError: some cases failed; names them with each reason."""
    cases_by_reason: dict[str, list[str]] = {}
    for case_id, reason in failed.items():
        cases_by_reason.setdefault(reason, []).append(case_id)
    if failed:
        lines = "\n".join(
            f"  case{'s' * (len(cases) > 1)} {some(cases, 20)}: {reason}"
            for reason, cases in cases_by_reason.items()
        )
        raise ValueError(f"{len(failed)} of {num_cases} cases could not be predicted\n{lines}")


def reason(error: Exception) -> str:
    """Why a case failed, on one line; the traceback of an unexpected error goes to the log."""
    if isinstance(error, ValueError):
        return str(error)
    lines = str(error).strip().splitlines()
    first_line = lines[0] if lines else ""
    text = f"{type(error).__name__}: {first_line}"
    if out_of_memory(error):
        return f"out of memory ({text}); try sw_batch_size=1, the CPU as the device, or fewer workers"
    log.error("%s", "".join(traceback.format_exception(error)))
    return f"{text} (a bug in medconv, please report it with the lines above)"


def stream(
    items: Iterable[Item],
    load: Callable[[Item], Loaded],
    predict: Callable[[Loaded], Answer],
    write: Callable[[Item, Answer], None],
    workers: int = 1,
) -> Iterator[tuple[Item, Exception | None]]:
    """Yields each item when it is finished, with its error or None; an error does not stop other items.

    Args:
        items: iterated in the caller's thread, as late as possible.
        load: runs in one of the loading threads.
        predict: runs in the caller's thread.
        write: runs in the writing thread.
        workers: items that are loaded at once.
    """
    writing: tuple[Item, Future[None]] | None = None
    with ThreadPoolExecutor(workers) as loaders, ThreadPoolExecutor(1) as writer:
        try:
            for item, loaded in _loaded(items, load, loaders, workers):
                predicted, error = _attempt(predict, loaded)
                _clear_frames(error)
                # They reference the case, which should not stay in memory.
                del loaded
                # The previous item was written while this one was predicted.
                if writing is not None:
                    yield writing[0], _error_of(writing[1])
                    writing = None
                if error is None:
                    writing = item, writer.submit(write, item, predicted)  # type: ignore[arg-type]
                else:
                    yield item, error
                del predicted
            if writing is not None:
                yield writing[0], _error_of(writing[1])
        except BaseException:
            loaders.shutdown(wait=False, cancel_futures=True)
            raise


def _loaded(
    items: Iterable[Item], load: Callable[[Item], Loaded], loaders: ThreadPoolExecutor, workers: int
) -> Iterator[tuple[Item, Future[Loaded]]]:
    """Items that are loaded, in order, while the next `workers` items are being loaded."""
    upcoming = iter(items)
    loading: deque[tuple[Item, Future[Loaded]]] = deque()

    def refill(number: int) -> None:
        for item in islice(upcoming, number - len(loading)):
            loading.append((item, loaders.submit(load, item)))

    refill(workers)
    while loading:
        wait([loading[0][1]])
        # One more than workers: the first one is loaded already.
        refill(workers + 1)
        yield loading.popleft()


def _attempt(
    predict: Callable[[Loaded], Answer], loaded: Future[Loaded]
) -> tuple[Answer | None, Exception | None]:
    try:
        return predict(loaded.result()), None
    except Exception as error:
        return None, error


def _error_of(future: Future[None]) -> Exception | None:
    error = future.exception()
    assert error is None or isinstance(error, Exception)
    _clear_frames(error)
    return error


def _clear_frames(error: BaseException | None) -> None:
    """Free the case, which an error's frames reference; the traceback can still be printed."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
