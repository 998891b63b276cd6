"""Label maps on the grids of the inputs, or a table of answers for whole images."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from tqdm import tqdm

import medconv
from medconv.data.case import Case
from medconv.data.io import dicom_seg as data_dicom_seg
from medconv.data.io.images import write_channels, write_label
from medconv.inference import postprocessing
from medconv.inference.errors import UnwritableError, need_none, reason, unwritable
from medconv.inference.exported.metadata import digest as digest
from medconv.inference.image_predictor import ImagePredictor
from medconv.inference.inputs import find_cases
from medconv.inference.load import LoadedModel, with_window
from medconv.inference.output_dir import RECORD as RECORD
from medconv.inference.output_dir import Folder
from medconv.inference.pipeline import stream
from medconv.inference.predict_images import predict_whole
from medconv.inference.predictor import Input, Predictor, Scores, load_members, with_room
from medconv.utils import signals
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging

Claimed = tuple[Case, Callable[[], None]]
log = logging.getLogger(__name__)


def run_command(options: argparse.Namespace) -> int:
    """`medconv predict` with these options. Returns: the exit code."""
    start_logging()
    if options.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {options.workers}")
    if options.overlap is not None and not 0 <= options.overlap < 1:
        raise ValueError(f"--overlap must be at least 0 and below 1, got {options.overlap}")
    steps = postprocessing.read(options.postprocess) if options.postprocess else None
    if not options.checkpoint and not options.exported_model:
        raise ValueError("--checkpoint or --exported-model is needed: the networks to predict with")
    device = usable_device(options.device)
    members = load_members(
        options.checkpoint, device, options.trust_package, options.mirror_axes, options.exported_model
    )
    if members[0].image_targets is not None:
        return _of_whole_images(members, device, options)
    if options.saliency:
        raise ValueError(f"--saliency: is for answers about whole images; {members[0].path} makes label maps")
    members = [with_window(member, options.overlap, options.sw_batch_size) for member in members]
    predictor = Predictor(members, device, steps.apply if steps else None)
    if steps:
        steps.check(predictor.targets)
    cases = find_cases(options.input, len(predictor.modalities))
    if options.dicom_seg:
        data_dicom_seg.check([case.images[0] for case in cases])
    made = {"postprocess": digest(options.postprocess) if options.postprocess else None}
    also = (options.save_probabilities, options.overwrite, options.workers, made, options.dicom_seg)
    return predict(predictor, cases, options.output, *also)


def _of_whole_images(members: Sequence[LoadedModel], device: str, options: argparse.Namespace) -> int:
    """Raises: ValueError: as `predict_whole`; options of label maps."""
    given = {
        "--save-probabilities": options.save_probabilities,
        "--dicom-seg": options.dicom_seg,
        "--postprocess": options.postprocess,
        "--overlap": options.overlap is not None,
    }
    if wrong := [name for name, value in given.items() if value]:
        raise ValueError(
            f"{wrong[0]}: is for label maps; {members[0].path} answers for whole images, into predictions.csv"
        )
    if options.sw_batch_size is not None and options.sw_batch_size < 1:
        raise ValueError(f"--sw-batch-size must be at least 1, got {options.sw_batch_size}")
    predictor = ImagePredictor(members, device, options.sw_batch_size)
    cases = find_cases(options.input, len(predictor.modalities))
    settings = {key: value for key, value in _settings(predictor).items() if key != "overlap"}
    about = {key: value for key, value in _about(predictor).items() if key != "targets"}
    also = (options.overwrite, options.workers, options.saliency)
    return predict_whole(predictor, cases, options.output, settings, about, *also)


def predict(
    predictor: Predictor,
    cases: Sequence[Case],
    output: Path,
    probabilities: bool = False,
    overwrite: bool = False,
    workers: int = 1,
    settings: dict[str, Any] | None = None,
    dicom_seg: bool = False,
) -> int:
    """Write one label map per case that has none yet and is in no other process's hands; a case that fails is
    named at the end, the rest is done.

    Args: probabilities, dicom_seg: written, too. workers: cases that are loaded at once. settings: what else
        decides the results.
    Returns: the exit code.
    Raises: ValueError: `output` holds other results, cases failed, or the disk is full.
    """
    folder = Folder(
        output, {**_settings(predictor), **(settings or {})}, _about(predictor), probabilities, dicom_seg
    )
    failed: dict[str, str] = {}
    limits = threadpool_limits(
        1, user_api="blas"
    )  # loading beside the network; each does its own matrix products
    with signals.raising(), folder.open(cases, overwrite), limits, tqdm(total=len(cases), **_BAR) as bar:
        done = stream(
            folder.claims(cases),
            partial(_load, predictor),
            predictor.scores,
            partial(_write, predictor, folder),
            workers,
        )
        for ended, ((case, release), error) in enumerate(done, 1):
            release()
            bar.update(ended + len(folder.skipped) - bar.n)
            if isinstance(error, UnwritableError):
                raise error
            if error is not None:
                failed[case.id] = reason(error)
        bar.update(len(cases) - len(folder.elsewhere) - bar.n)  # those found done after the last
    return _report(folder, len(cases), failed)


_BAR: dict[str, Any] = {"desc": "predicting", "unit": "case", "disable": None}


def _load(predictor: Predictor, claimed: Claimed) -> Input:
    given = predictor.read(claimed[0])
    if given.warning:
        log.warning("case %s: %s", claimed[0].id, given.warning)
    return given


@torch.inference_mode()
def _write(predictor: Predictor, folder: Folder, claimed: Claimed, scores: Scores) -> None:
    """The label map comes last: with it the case is done. Raises: Unwritable: no room, or no permission."""
    case = claimed[0]
    label = predictor.label(scores)
    try:
        if folder.writes_probabilities:
            path, count = folder.probabilities(case.id), predictor.targets.num_outputs
            with_room(scores, lambda kept: write_channels(path, kept.probabilities(), count, case.images[0]))
        if folder.writes_dicom_seg:
            data_dicom_seg.write(folder.dicom_seg(case.id), label, case.images[0], predictor.class_names)
        write_label(folder.label(case.id), label, case.images[0])
    except OSError as error:
        raise unwritable(folder.path, case.id, error) from error


def _report(folder: Folder, number: int, failed: dict[str, str]) -> int:
    left, before = len(folder.elsewhere), len(folder.skipped)
    now = number - left - before - len(failed)
    log.info(
        "%d of %d predictions are in %s: %d made now, %d before or by others",
        now + before,
        number,
        folder.path,
        now,
        before,
    )
    if left:
        log.info("%d cases are in the hands of other processes, such as %s", left, folder.elsewhere[0])
    need_none(failed, number)
    return DONE


def _settings(predictor: Predictor) -> dict[str, Any]:
    """What decides the results, and so must be the same for all cases of a folder."""
    windows = [member.window for member in predictor.members]
    return {
        "checkpoints": [
            digest(member.card or member.path)[:16] for member in predictor.members if member.path
        ],
        "overlap": [window.overlap for window in windows],
        "mirror_axes": [list(window.mirror_axes) for window in windows],
    }


def _about(predictor: Predictor) -> dict[str, Any]:
    paths = [str(member.path) for member in predictor.members]
    return {
        "checkpoint": paths[0],
        "checkpoints": paths,
        "class_names": list(predictor.class_names),
        "targets": predictor.targets.plain(),
        "versions": {"medconv": medconv.__version__, **{name: version(name) for name in ("torch", "monai")}},
    }


def usable_device(wanted: str | None) -> str:
    """Raises: ValueError: there is no such device here."""
    device = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter: torch was built without it
        raise ValueError(
            f"--device {device}: cannot be used here ({str(error).strip().splitlines()[0]})"
        ) from error
    return device
