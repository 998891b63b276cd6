"""`medconv predict`: write a label map for each image, or one table for classification and regression."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from medconv import doors
from medconv.cli.parsers import Group, Parser, add_device, add_package, flag_of, name_of
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import some, start_logging

if TYPE_CHECKING:
    from medconv.data.case import Case
    from medconv.inference.extras import Extra
    from medconv.inference.predictor import Predictor

# Options that have an effect for label maps alone; an `Extra` says so itself.
_FOR_LABEL_MAPS = ("save_probabilities", "overlap")
log = logging.getLogger(__name__)


def parser() -> Parser:
    command = Parser(
        "predict",
        "--checkpoint runs/NAME/checkpoints/best.ckpt --input images/ --output predictions/",
        "Predict images with trained networks. Segmentation writes a label map for each image; "
        "classification and regression write one table, predictions.csv.",
    )
    command.add_argument_group("networks").add_argument(
        "--checkpoint",
        type=Path,
        nargs="+",
        # A second `--checkpoint` adds to the first.
        action="extend",
        required=True,
        metavar="PATH",
        help="a run's folder or its checkpoints/best.ckpt; several are averaged",
    )
    _add_input_and_output(command.add_argument_group("input and output"))
    inference = command.add_argument_group(
        "sliding window and test-time augmentation (default: as validated in training)"
    )
    inference.add_argument(
        "--mirror-axes",
        type=int,
        nargs="*",
        metavar="AXIS",
        help="axes to flip in test-time augmentation; without numbers, no flips",
    )
    inference.add_argument("--overlap", type=float, help="overlap of windows, from 0 to below 1")
    inference.add_argument(
        "--sw-batch-size", type=int, metavar="N", help="windows, or whole images, in one forward pass"
    )
    general = command.general()
    add_device(general)
    general.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="cases to load in parallel, fewer if memory would run out; N + 2 cases are in memory; default 1",
    )
    add_package(general)
    return command


def _add_input_and_output(group: Group) -> None:
    group.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="PATH",
        help="an image, a folder of images or DICOM, a pattern with {id}, or a list (.txt, .json or .csv)",
    )
    group.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder for the label maps, or for predictions.csv",
    )
    group.add_argument(
        "--save-probabilities", action="store_true", help="also write OUTPUT/probabilities/CASE.nii.gz, 4D"
    )
    group.add_argument(
        "--source-spacing-mm",
        type=float,
        nargs="*",
        metavar="MM",
        help="replace the headers' spacing, in mm (right, anterior, superior); without numbers, keep it",
    )
    for option in doors.mapping(doors.PREDICT_OPTIONS).values():
        for flag, arguments in option["flags"].items():
            group.add_argument(flag, **arguments)
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the results of these cases in OUTPUT; resume a stopped replacement",
    )


def run_command(options: argparse.Namespace) -> int:
    """Check the options, load the networks and predict the cases. Returns: the exit code."""
    from medconv.data.per_case import check_source_spacing
    from medconv.inference.inputs import check_source
    from medconv.inference.output import ReplaceableResultsError
    from medconv.inference.predict import output_in, predict, usable_device
    from medconv.inference.predictor import Predictor

    start_logging()
    # What can be checked before anything is read.
    if options.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {options.workers}")
    if options.source_spacing_mm:
        check_source_spacing(options.source_spacing_mm)
    check_source(options.input, "--input")
    _check_folders(options.input, options.output)
    # What features add by the options that are given.
    extras: list[Extra] = []
    for entry, option in doors.mapping(doors.PREDICT_OPTIONS).items():
        if any(getattr(options, name_of(flag)) for flag in option["flags"]):
            extras.append(doors.load(entry)(options))
    predictor = Predictor.load(
        options.checkpoint,
        device=usable_device(options.device),
        trusted=options.package,
        mirror_axes=options.mirror_axes,
        overlap=options.overlap,
        sw_batch_size=options.sw_batch_size,
        source_spacing_mm=options.source_spacing_mm,
        extras=extras,
    )
    if extras or predictor.targets.family.forward:
        _check_options(options, predictor)
    cases = _find_cases(options.input, predictor)
    for extra in extras:
        extra.begin(predictor, cases)
    output = output_in(options.output, predictor, probabilities=options.save_probabilities)
    try:
        predict(predictor, cases, output, options.overwrite, options.workers)
    except ReplaceableResultsError as error:
        raise ValueError(
            f"--output {error.folder}: {error.conflict}; take another folder, or --overwrite to replace them"
        ) from error
    return DONE


def _check_folders(images: Path, output: Path) -> None:
    """Raises: ValueError: later, predictions would be taken for images; or a file where a folder is meant."""
    from medconv.data.io.formats import choice_of
    from medconv.data.io.images import suffixes

    if output.name.endswith((".csv", *suffixes())) and not output.is_dir():
        raise ValueError(
            f"--output {output}: names a file, expected a folder, in which each case has a file of its name"
        )

    folder, _ = choice_of(images)
    if folder.is_dir() and output.is_dir() and folder.samefile(output):
        raise ValueError(f"--output {output}: is the folder of the images; take another one")


def _check_options(options: argparse.Namespace, predictor: Predictor) -> None:
    """Raises: ValueError: an option that has no effect for these networks."""
    path = predictor.members[0].path
    per_voxel = predictor.targets.per_voxel
    answers = "label maps" if predictor.targets.answers_classes else predictor.targets.kind
    reason = f"is for classification and regression; {path} predicts {answers}"
    if not per_voxel:
        reason = f"is for label maps; {path} is an image-level network, which writes predictions.csv"
    without_effect = [extra.flag for extra in predictor.extras if extra.per_voxel != per_voxel]
    if per_voxel and not predictor.targets.answers_classes and not without_effect:
        reason = f"is for label maps of classes; {path} predicts {answers}"
        without_effect = [extra.flag for extra in predictor.extras]
        if predictor.targets.family.forward and options.save_probabilities:
            without_effect.append("--save-probabilities")
    if not per_voxel:
        values = {name: getattr(options, name) for name in _FOR_LABEL_MAPS}
        # By identity: --overlap 0 is given, too.
        given = [name for name, value in values.items() if value is not None and value is not False]
        without_effect += map(flag_of, given)
    if without_effect:
        raise ValueError(f"{without_effect[0]} {reason}")


def _find_cases(source: Path, predictor: Predictor) -> list[Case]:
    spacing_mm = predictor.members[0].source_spacing_mm
    if spacing_mm:
        log.info(
            "spacing of the images, in place of their headers: %s mm (data.source_spacing_mm)", spacing_mm
        )
    cases = predictor.find_cases(source, "--input")
    for channel, name in enumerate(predictor.modalities):
        lacking = [case.id for case in cases if channel in case.missing_channels]
        if lacking and predictor.takes_missing:
            log.warning("%d of %d cases lack %s: %s", len(lacking), len(cases), name, some(lacking, 3))
    trained = [case.id for case in cases if case.id in predictor.train_cases]
    if trained:
        log.warning(
            "cases with names of training cases: %d of %d (%s); their scores will be optimistic",
            len(trained),
            len(cases),
            some(trained, 2),
        )
    return cases
