"""`medconv predict`: label maps on the grids of the inputs, or a table of image-level predictions."""

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
from medconv.inference.errors import UnwritableError, check_all_predicted, reason, unwritable
from medconv.inference.exported.metadata import digest
from medconv.inference.image_level_predictor import ImageLevelPredictor
from medconv.inference.inputs import find_cases
from medconv.inference.load import LoadedModel, with_window
from medconv.inference.output_dir import OutputDir
from medconv.inference.pipeline import stream
from medconv.inference.predict_image_level import predict_image_level
from medconv.inference.predictor import Input, Predictor, Scores, load_members, with_cpu_fallback
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
    if not members[0].targets.per_voxel:
        return _run_image_level(members, device, options)
    if options.saliency:
        raise ValueError(
            f"--saliency is for classification and regression; {members[0].path} predicts label maps"
        )
    members = [with_window(member, options.overlap, options.sw_batch_size) for member in members]
    predictor = Predictor(members, device, steps.apply if steps else None)
    if steps:
        steps.check(predictor.segmentation_targets)
    cases = find_cases(options.input, len(predictor.modalities))
    if options.dicom_seg:
        data_dicom_seg.check([case.images[0] for case in cases])
    return predict(
        predictor,
        cases,
        options.output,
        probabilities=options.save_probabilities,
        overwrite=options.overwrite,
        workers=options.workers,
        settings={"postprocess": digest(options.postprocess) if options.postprocess else None},
        dicom_seg=options.dicom_seg,
    )


def _run_image_level(members: Sequence[LoadedModel], device: str, options: argparse.Namespace) -> int:
    """Raises: ValueError: as `predict_image_level`; an option that is for label maps."""
    segmentation_options = {
        "--save-probabilities": options.save_probabilities,
        "--dicom-seg": options.dicom_seg,
        "--postprocess": options.postprocess,
        "--overlap": options.overlap is not None,
    }
    if wrong := [name for name, value in segmentation_options.items() if value]:
        raise ValueError(
            f"{wrong[0]} is for label maps; {members[0].path} is an image-level network, whose predictions "
            "go into predictions.csv"
        )
    if options.sw_batch_size is not None and options.sw_batch_size < 1:
        raise ValueError(f"--sw-batch-size must be at least 1, got {options.sw_batch_size}")
    predictor = ImageLevelPredictor(members, device, options.sw_batch_size)
    cases = find_cases(options.input, len(predictor.modalities))
    settings = {key: value for key, value in _settings(predictor).items() if key != "overlap"}
    about = {key: value for key, value in _about(predictor).items() if key != "targets"}
    work = (options.overwrite, options.workers, options.saliency)
    return predict_image_level(predictor, cases, options.output, settings, about, *work)


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
    """Write one label map per case that has none yet and that no other process works on. Cases that fail are
    named at the end, and do not stop the others.

    Args: probabilities, dicom_seg: written, too. workers: cases that are loaded at once. settings: what else
        determines the results.
    Returns: the exit code.
    Raises: ValueError: `output` holds other results, cases failed, or the disk is full.
    """
    folder = OutputDir(
        output, {**_settings(predictor), **(settings or {})}, _about(predictor), probabilities, dicom_seg
    )
    failed: dict[str, str] = {}
    # One thread per matrix product in NumPy and SciPy: `workers` of them load beside the network.
    limits = threadpool_limits(1, user_api="blas")
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
        bar.update(len(cases) - len(folder.claimed_by_others) - bar.n)  # also those that were finished before
    return _report(folder, len(cases), failed)


_BAR: dict[str, Any] = {"desc": "predicting", "unit": "case", "disable": None}


def _load(predictor: Predictor, claimed: Claimed) -> Input:
    case_input = predictor.read(claimed[0])
    if case_input.warning:
        log.warning("case %s: %s", claimed[0].id, case_input.warning)
    return case_input


@torch.inference_mode()
def _write(predictor: Predictor, folder: OutputDir, claimed: Claimed, scores: Scores) -> None:
    """The label map is written last: a case with a label map is done. Raises: UnwritableError: the disk is
    full, or no permission.
    """
    case = claimed[0]
    label = predictor.label(scores)
    try:
        if folder.writes_probabilities:
            path, count = folder.probabilities(case.id), predictor.targets.num_outputs
            with_cpu_fallback(
                scores, lambda placed: write_channels(path, placed.probabilities(), count, case.images[0])
            )
        if folder.writes_dicom_seg:
            data_dicom_seg.write(folder.dicom_seg(case.id), label, case.images[0], predictor.class_names)
        write_label(folder.label(case.id), label, case.images[0])
    except OSError as error:
        raise unwritable(folder.path, case.id, error) from error


def _report(folder: OutputDir, number: int, failed: dict[str, str]) -> int:
    others, before = len(folder.claimed_by_others), len(folder.skipped)
    now = number - others - before - len(failed)
    log.info(
        "%d of %d predictions are in %s: %d made now, %d before or by others",
        now + before,
        number,
        folder.path,
        now,
        before,
    )
    if others:
        log.info("other processes still work on %d cases, such as %s", others, folder.claimed_by_others[0])
    check_all_predicted(failed, number)
    return DONE


def _settings(predictor: Predictor) -> dict[str, Any]:
    """What determines the results, and so must be the same for all cases of a folder."""
    windows = [member.window for member in predictor.members]
    return {
        "checkpoints": [
            digest(member.metadata_path or member.path)[:16] for member in predictor.members if member.path
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


def usable_device(name: str | None) -> str:
    """The device with this name; None: the GPU if there is one, else the CPU. Raises: ValueError: this
    machine has no such device.
    """
    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter: torch was built without it
        raise ValueError(
            f"--device {device}: cannot be used here ({str(error).strip().splitlines()[0]})"
        ) from error
    return device
