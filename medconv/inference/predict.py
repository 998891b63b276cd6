"""`medconv predict`: label maps on the grids of the inputs, or a table of image-level predictions."""

import argparse
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

import medconv
from medconv.data import per_case
from medconv.data.case import Case
from medconv.data.io import dicom_seg as data_dicom_seg
from medconv.inference import postprocessing
from medconv.inference.errors import check_all_predicted, reason, unwritable
from medconv.inference.exported.metadata import digest
from medconv.inference.forward import Input
from medconv.inference.inputs import check_source, find_cases
from medconv.inference.output import Claim, Output
from medconv.inference.output_dir import OutputDir
from medconv.inference.output_table import OutputTable
from medconv.inference.pipeline import stream
from medconv.inference.predictor import Predictor
from medconv.inference.quality import Line, read_calibration
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils import signals
from medconv.utils.errors import explained, first_line
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import some, start_logging
from medconv.utils.progress import counting

# Options for one family of targets: whether that is label maps
_FOR_LABEL_MAPS = {
    "save_probabilities": True,
    "dicom_seg": True,
    "quality": True,
    "calibration": True,
    "postprocess": True,
    "overlap": True,
    "saliency": False,
}
Predicted = list[tuple[Case, Any]]  # with its scores
log = logging.getLogger(__name__)


def run_command(options: argparse.Namespace) -> int:
    """`medconv predict` with these options. Returns: the exit code."""
    start_logging()
    _check_values(options)
    steps = postprocessing.read(options.postprocess) if options.postprocess else None
    predictor = Predictor.load(
        options.checkpoint,
        usable_device(options.device),
        options.trust_package,
        options.mirror_axes,
        options.overlap,
        options.sw_batch_size,
        steps.apply if steps else None,
        options.exported_model,
        options.quality,
        options.source_spacing_mm,
    )
    _check_options(options, predictor)
    if steps and isinstance(predictor.targets, SegmentationTargets):
        steps.check(predictor.targets)
    if stated := predictor.members[0].source_spacing_mm:
        log.info("spacing of the images, in place of their headers': %s mm (data.source_spacing_mm)", stated)
    targets = predictor.targets
    columns = targets.default_columns if isinstance(targets, ImageLevelTargets) else ()
    cases = find_cases(options.input, len(predictor.modalities), columns)
    if known := [case.id for case in cases if case.id in predictor.train_cases]:
        what = "the network was trained on %d of these %d cases, by their names (%s): scores will be too good"
        log.warning(what, len(known), len(cases), some(known, 2))
    if options.dicom_seg:
        data_dicom_seg.check([case.images[0] for case in cases])
    files = (options.save_probabilities, options.dicom_seg, options.saliency, options.postprocess)
    lines: dict[str, Line | None] = {}
    if options.calibration and isinstance(predictor.targets, SegmentationTargets):
        lines = read_calibration(options.calibration, predictor.targets.names)
    for name in (name for name, line in lines.items() if line is None):
        log.warning("%s: no calibration of %s, there were too few cases", options.calibration, name)
    output = output_in(options.output, predictor, *files, quality=options.quality, calibration=lines)
    return predict(predictor, cases, output, options.overwrite, options.workers)


def _check_values(options: argparse.Namespace) -> None:
    for name in ("workers", "sw_batch_size"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if options.overlap is not None and not 0 <= options.overlap < 1:
        raise ValueError(f"--overlap must be at least 0 and below 1, got {options.overlap}")
    if options.source_spacing_mm:
        with explained("--source-spacing-mm", ValueError):
            per_case.check_source_spacing(options.source_spacing_mm)
    check_source(options.input)
    if options.quality and len(options.checkpoint) + len(options.exported_model) < 2:
        raise ValueError(
            "--quality measures how far several networks agree, such as the folds of a cross-validation; "
            "--checkpoint and --exported-model name only one"
        )
    if options.calibration and not options.quality:
        raise ValueError("--calibration turns the agreement of --quality into Dice: add --quality")
    if not options.checkpoint and not options.exported_model:
        raise ValueError("--checkpoint or --exported-model is needed: the networks to predict with")


def _check_options(options: argparse.Namespace, predictor: Predictor) -> None:
    """Raises: ValueError: an option that has no effect for these networks."""
    first = predictor.members[0]
    for name, for_label_maps in _FOR_LABEL_MAPS.items():
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is None or value is False or for_label_maps == first.targets.per_voxel:
            continue
        if first.targets.per_voxel:
            raise ValueError(
                f"{option} is for classification and regression; {first.path} predicts label maps"
            )
        raise ValueError(
            f"{option} is for label maps; {first.path} is an image-level network, whose predictions go into "
            "predictions.csv"
        )
    if options.saliency and all(member.metadata_path is not None for member in predictor.members):
        raise ValueError(
            "--saliency needs a network from --checkpoint; exported models have no layers to look at"
        )


def output_in(
    folder: Path,
    predictor: Predictor,
    probabilities: bool = False,
    dicom_seg: bool = False,
    saliency: bool = False,
    postprocess: Path | None = None,
    quality: bool = False,
    calibration: Mapping[str, Line | None] | None = None,
) -> Output:
    """The output folder for this predictor.

    Args: probabilities, dicom_seg, saliency, quality: written, too; as in `OutputDir` and `OutputTable`.
        postprocess: the file with the predictor's post-processing. calibration: as in `OutputDir`.
    """
    members, about = predictor.members, _about(predictor)
    stated = {"source_spacing_mm": spacing} if (spacing := members[0].source_spacing_mm) else {}
    checkpoints = {"checkpoints": [digest(m.metadata_path or m.path)[:16] for m in members if m.path]}
    flips = {"mirror_axes": [list(member.window.mirror_axes) for member in members]}
    if isinstance(predictor.targets, ImageLevelTargets):
        return OutputTable(folder, predictor.targets, {**checkpoints, **flips, **stated}, about, saliency)
    overlap = {"overlap": [member.window.overlap for member in members]}
    steps = {"postprocess": digest(postprocess) if postprocess else None}
    settings = {**checkpoints, **overlap, **flips, **steps, **stated}
    return OutputDir(folder, settings, about, probabilities, dicom_seg, quality, calibration)


def _about(predictor: Predictor) -> dict[str, Any]:
    paths = [str(member.path) for member in predictor.members]
    return {
        "checkpoint": paths[0],
        "checkpoints": paths,
        "class_names": list(predictor.class_names),
        "targets": predictor.targets.plain(),
        "train_cases": sorted(predictor.train_cases),
        "versions": {"medconv": medconv.__version__, **{name: version(name) for name in ("torch", "monai")}},
    }


def predict(
    predictor: Predictor, cases: Sequence[Case], output: Output, overwrite: bool = False, workers: int = 1
) -> int:
    """Predict each case that is not done yet and that no other process works on. Cases that fail are named at
    the end, and do not stop the others.

    Args: workers: batches of cases that are loaded at once.
    Returns: the exit code.
    Raises: ValueError: `output` holds other results, cases failed, or the disk is full.
    """
    failed: dict[str, str] = {}
    # One thread per matrix product in NumPy and SciPy: `workers` of them load beside the network.
    limits = threadpool_limits(1, user_api="blas")
    bar = counting("predicting", len(cases))
    with signals.raising(), output.open(cases, overwrite), limits, bar:
        ended, batches = 0, _batches(output.claims(cases), predictor.forward.batch_size)
        load, scores = partial(_load, predictor, failed), partial(_scores, predictor, failed)
        write = partial(_write, predictor, output, failed)
        for batch, error in stream(batches, load, scores, write, workers):
            for _, release in batch:
                release()
            if error is not None:
                raise error
            ended += len(batch)
            bar.update(bar.task_ids[0], completed=ended + len(output.skipped))
    _report(output, len(cases), len(failed))
    check_all_predicted({case.id: failed[case.id] for case in cases if case.id in failed}, len(cases))
    return DONE


def _batches(claims: Iterable[Claim], size: int) -> Iterator[list[Claim]]:
    claims = iter(claims)
    while batch := list(islice(claims, size)):
        yield batch


def _load(predictor: Predictor, failed: dict[str, str], batch: Sequence[Claim]) -> list[Input]:
    inputs: list[Input] = []
    for case, _ in batch:
        try:
            inputs.append(predictor.read(case))
        except Exception as error:  # of this case alone
            failed[case.id] = reason(error)
            continue
        if inputs[-1].warning:
            log.warning("case %s: %s", case.id, inputs[-1].warning)
    return inputs


def _scores(predictor: Predictor, failed: dict[str, str], inputs: Sequence[Input]) -> Predicted:
    """Of a batch; if that fails, case by case, so that only the failing case is lost."""
    if not inputs:
        return []
    try:
        return [(i.case, scores) for i, scores in zip(inputs, predictor.scores(inputs), strict=True)]
    except Exception as error:
        if len(inputs) == 1:
            failed[inputs[0].case.id] = reason(error)
            return []
    return [pair for single in inputs for pair in _scores(predictor, failed, [single])]


def _write(
    predictor: Predictor, output: Output, failed: dict[str, str], _: Sequence[Claim], predicted: Predicted
) -> None:
    """Raises: ValueError: the disk is full, or no permission."""
    for case, scores in predicted:
        try:
            output.write(predictor, case, scores)
        except OSError as error:
            raise unwritable(output.path, case.id, error) from error
        except Exception as error:  # of this case alone
            failed[case.id] = reason(error)


def _report(output: Output, number: int, failed: int) -> None:
    others, before = len(output.claimed_by_others), len(output.skipped)
    now = number - others - before - failed
    counts = (before + now, number, output.place, now, before, output.earlier)
    log.info("%d of %d predictions are in %s: %d made now, %d %s", *counts)
    if others:
        log.info("other processes still work on %d cases, such as %s", others, output.claimed_by_others[0])


def usable_device(name: str | None) -> str:
    """The device with this name; None: the GPU if there is one, else the CPU. Raises: ValueError: this
    machine has no such device.
    """
    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter: torch was built without it
        raise ValueError(f"--device {device}: cannot be used here ({first_line(error)})") from error
    return device
