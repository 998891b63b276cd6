"""What `medconv predict` does with its options: check them, load the networks, predict the cases."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from medconv.cli.flags import flag_of
from medconv.data import per_case
from medconv.data.case import Case
from medconv.data.io import dicom_seg
from medconv.inference import postprocessing
from medconv.inference.inputs import check_source, find_cases
from medconv.inference.output import ReplaceableResultsError
from medconv.inference.postprocessing import Steps
from medconv.inference.predict import output_in, predict, usable_device
from medconv.inference.predictor import Predictor
from medconv.inference.quality import PAIRWISE, SOFT, Line, read_calibration
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import some, start_logging

# Options that have an effect for one family of targets alone.
_FOR_LABEL_MAPS = ("save_probabilities", "dicom_seg", "quality", "calibration", "postprocess", "overlap")
_FOR_WHOLE_IMAGES = ("saliency",)
log = logging.getLogger(__name__)


def run_command(options: argparse.Namespace) -> int:
    """`medconv predict` with these options. Returns: the exit code."""
    start_logging()
    _check_values(options)
    steps = postprocessing.read(options.postprocess) if options.postprocess else None
    predictor = _load(options, steps)
    cases = _find_cases(options.input, predictor)
    if options.dicom_seg:
        dicom_seg.check([case.images[0] for case in cases])
    output = output_in(
        options.output,
        predictor,
        probabilities=options.save_probabilities,
        dicom_seg=options.dicom_seg,
        saliency=options.saliency,
        quality=options.quality,
        calibration=_calibration(options.calibration, predictor),
        postprocess=options.postprocess,
    )
    try:
        predict(predictor, cases, output, options.overwrite, options.workers)
    except ReplaceableResultsError as error:
        raise ValueError(
            f"--output {error.folder}: {error.conflict}; take another folder, or --overwrite to replace them"
        ) from error
    return DONE


def _check_values(options: argparse.Namespace) -> None:
    """Check what can be checked before anything is read."""
    if options.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {options.workers}")
    if options.source_spacing_mm:
        per_case.check_source_spacing(options.source_spacing_mm, "--source-spacing-mm")
    check_source(options.input, "--input")
    if options.calibration and not options.quality:
        raise ValueError("--calibration turns what --quality measures into Dice: add --quality")


def _load(options: argparse.Namespace, steps: Steps | None) -> Predictor:
    predictor = Predictor.load(
        options.checkpoint,
        device=usable_device(options.device),
        trusted=options.trust_package,
        mirror_axes=options.mirror_axes,
        overlap=options.overlap,
        sw_batch_size=options.sw_batch_size,
        source_spacing_mm=options.source_spacing_mm,
        finish=steps.apply if steps else None,
        with_quality=options.quality,
    )
    _check_options(options, predictor)
    if steps and isinstance(predictor.targets, SegmentationTargets):
        steps.check(predictor.targets)
    spacing_mm = predictor.members[0].source_spacing_mm
    if spacing_mm:
        log.info(
            "spacing of the images, in place of their headers': %s mm (data.source_spacing_mm)", spacing_mm
        )
    return predictor


def _check_options(options: argparse.Namespace, predictor: Predictor) -> None:
    """Raises: ValueError: an option that has no effect for these networks."""
    first = predictor.members[0]
    without_effect: tuple[str, ...]
    if first.targets.per_voxel:
        without_effect = _FOR_WHOLE_IMAGES
        reason = f"is for classification and regression; {first.path} predicts label maps"
    else:
        without_effect = _FOR_LABEL_MAPS
        reason = (
            f"is for label maps; {first.path} is an image-level network, whose predictions go into "
            "predictions.csv"
        )
    for name in without_effect:
        # 0 is a value: --overlap 0
        if getattr(options, name) is not None and getattr(options, name) is not False:
            raise ValueError(f"{flag_of(name)} {reason}")


def _find_cases(source: Path, predictor: Predictor) -> list[Case]:
    answers: Sequence[str] = ()
    if isinstance(predictor.targets, ImageLevelTargets):
        answers = predictor.targets.default_columns
    cases = find_cases(
        source,
        len(predictor.modalities),
        answers,
        "--input",
        takes_missing=predictor.takes_missing,
        image_patterns=predictor.members[0].image_patterns,
    )
    for channel, name in enumerate(predictor.modalities):
        lacking = [case.id for case in cases if channel in case.missing_channels]
        if lacking and predictor.takes_missing:
            log.warning("%d of %d cases lack %s: %s", len(lacking), len(cases), name, some(lacking, 3))
    trained = [case.id for case in cases if case.id in predictor.train_cases]
    if trained:
        log.warning(
            "%d of these %d cases (%s) have names of training cases; their scores will be optimistic",
            len(trained),
            len(cases),
            some(trained, 2),
        )
    return cases


def _calibration(path: Path | None, predictor: Predictor) -> Mapping[str, Line | None]:
    """Per class, the line from what `--quality` measures to Dice."""
    if path is None or not isinstance(predictor.targets, SegmentationTargets):
        return {}
    method = PAIRWISE if len(predictor.members) > 1 else SOFT
    lines = read_calibration(path, predictor.targets.names, method)
    for name, line in lines.items():
        if line is None:
            log.warning("%s: no calibration of %s, there were too few cases", path, name)
    return lines
