"""Find by cross-validation which post-processing improves the predictions."""

import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from medconv.data.case import Case
from medconv.data.case_files import label_of
from medconv.data.io.grids import on_grid
from medconv.data.io.images import read_label
from medconv.data.per_case import source_spacing
from medconv.evaluation.case_measurement import stated_spacing
from medconv.features.cross_validation import results as cross_validation
from medconv.features.cross_validation.folds import Fold
from medconv.features.cross_validation.results import CrossValidation
from medconv.features.postprocessing.decision import Decision
from medconv.features.postprocessing.search import LabelledCase, Load, candidates, decide, volumes
from medconv.features.postprocessing.validated_cases import validated_cases
from medconv.inference.output import OutputDir
from medconv.inference.predict import output_in, predict
from medconv.inference.predictor import Predictor
from medconv.metrics.dice import dice
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils import signals
from medconv.utils.atomic_io import write_text
from medconv.utils.digests import digest
from medconv.utils.errors import Argument, ArgumentError
from medconv.utils.logging import some

_CACHE_BYTES = 2**31  # of label maps that stay in memory
_TOLERANCE = 0.02  # Dice; differences that another device may cause

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """A complete cross-validation to search on.

    Args:
        runs: its folder.
        suffix: of its files, where the folder holds several.
    """

    crossval: CrossValidation
    runs: Path
    suffix: str


@dataclass(frozen=True)
class Result:
    """Args: path: of the file of steps. num_cases: that were predicted."""

    decision: Decision
    path: Path
    num_cases: int


def find(selection: Selection, trusted: Sequence[str], device: str) -> Result:
    """Predict the validation cases of every fold, choose the steps, and write them.

    Args:
        trusted: packages whose classes a checkpoint may name.
    Raises:
        ValueError: an incomplete cross-validation, or one without label maps.
    """
    crossval = selection.crossval
    runs = selection.runs
    _check(crossval, runs)
    cases = validated_cases(crossval, runs, trusted)
    # predictions of finished cases stay, so that a stopped command goes on where it was
    with signals.raising():
        folder = runs / f"validation{selection.suffix}"
        predictions, targets = _predict_folds(crossval, cases, folder, trusted, device)
        load = _loader(predictions, cases)
        _compare_with_training(crossval, load, targets)
        names = list(predictions)
        steps = candidates(volumes(load, names, targets), targets)
        decision = decide(load, names, targets, steps)
    path = runs / f"postprocessing{selection.suffix}.json"
    _write(path, decision, targets, crossval)
    return Result(decision, path, len(predictions))


def select(runs: Path, name: str | None) -> Selection:
    """The cross-validation of a folder.

    Args:
        name: its label or key, if the folder holds several.
    Raises:
        ArgumentError: no cross-validation there, or more than one.
    """
    crossvals = cross_validation.read(runs)
    if not crossvals:
        raise ArgumentError(
            "runs",
            f" {runs}: no folds of a cross-validation found; train them by medconv train -m "
            "data.fold=0,1,2,3,4",
        )
    selected = [crossval for crossval in crossvals if name in (None, crossval.label, crossval.key)]
    if len(selected) != 1:
        names = " or ".join(repr(crossval.label or crossval.key) for crossval in crossvals)
        problem = "more than one cross-validation there" if selected else f"none of them is {name!r}"
        raise ArgumentError("runs", f" {runs}: {problem}; ", Argument("select"), f" {names}")
    (crossval,) = selected
    suffix = f"-{crossval.key}" if len(crossvals) > 1 else ""
    return Selection(crossval, runs, suffix)


def _check(crossval: CrossValidation, runs: Path) -> None:
    """Raises: ValueError: no label maps, or a fold that is not complete."""
    if crossval.missing:
        missing = ", ".join(f"{number} ({state})" for number, state in crossval.missing.items())
        raise ArgumentError(
            "runs", f" {runs}: missing: fold {missing}; each must be trained to its end, on the same classes"
        )
    for fold in crossval.folds:
        checkpoint = fold.folder.best
        if not checkpoint.is_file():
            raise ValueError(f"{checkpoint}: no such checkpoint; it is needed to predict fold {fold.number}")
    if not crossval.targets.answers_classes:
        raise ValueError(
            f"{runs}: post-processing is for segmentation, these runs have {crossval.targets.kind} targets"
        )


def _loader(predictions: Mapping[str, Path], cases: Mapping[str, Case]) -> Load:
    """Prediction and reference by `FOLD/CASE`, cropped; small datasets stay in memory."""
    cache: dict[str, LabelledCase] = {}
    folders = {path.parent for path in predictions.values()}
    spacings = {folder: stated_spacing(folder) for folder in folders}

    def load(name: str) -> LabelledCase:
        if name in cache:
            return cache[name]
        case_id = name.split("/", 1)[1]
        path = predictions[name]
        sample = _read_case(path, cases[case_id], spacings[path.parent])
        # each step is tried on every case again, so reading files would dominate
        if sum(map(_num_bytes, (*cache.values(), sample))) <= _CACHE_BYTES:
            cache[name] = sample
        return sample

    return load


def _read_case(prediction_path: Path, case: Case, spacing: object) -> LabelledCase:
    """Args: spacing: what `data.source_spacing_mm` stated."""
    assert case.label is not None
    prediction, grid = read_label(prediction_path)
    if case.soft_label is None:
        reference, reference_grid = read_label(case.label, prediction_path, case.relabel)
    else:
        reference, reference_grid = label_of(case)
    reference = on_grid(reference, prediction_path, grid, case.label, reference_grid)
    grid = grid.with_spacing_mm(source_spacing(spacing, case.id))
    return LabelledCase(prediction, reference, grid).cropped()


def _num_bytes(sample: LabelledCase) -> int:
    return sample.prediction.nbytes + sample.reference.nbytes


def _predict_folds(
    crossval: CrossValidation, cases: Mapping[str, Case], folder: Path, trusted: Sequence[str], device: str
) -> tuple[dict[str, Path], SegmentationTargets]:
    """Predict every fold's cases by its best checkpoint, if that is not done yet.

    Returns:
        `FOLD/CASE` to the label map, and the targets.
    """
    predictions: dict[str, Path] = {}
    targets: SegmentationTargets | None = None
    for fold in crossval.folds:
        predictor = Predictor.load([fold.folder.best], device, trusted)
        if targets is not None and predictor.targets != targets:
            raise ValueError(f"{fold.folder.best}: its classes differ from those of the other folds")
        assert isinstance(predictor.targets, SegmentationTargets)  # as the folds' checkpoints have them
        targets = predictor.targets
        fold_folder = _fold_folder(folder, fold)
        log.info("fold %s: %s", fold.number, fold.folder.best)
        output = output_in(fold_folder, predictor)
        assert isinstance(output, OutputDir)  # of label maps
        predict(predictor, [cases[case_id] for case_id in fold.rows], output)
        predictions |= {f"{fold.number}/{case_id}": output.label(case_id) for case_id in fold.rows}
    assert targets is not None
    return predictions, targets


def _fold_folder(folder: Path, fold: Fold) -> Path:
    """The folder for a fold's predictions; removes predictions of an earlier checkpoint of the same fold."""
    prefix = f"fold{int(fold.number)}-"
    name = prefix + digest(fold.folder.best)[:8]
    of_same_fold = re.compile(f"{prefix}[0-9a-f]{{8}}")
    for path in folder.iterdir() if folder.is_dir() else ():
        # nothing is removed behind a link
        is_earlier = of_same_fold.fullmatch(path.name) and path.name != name
        if is_earlier and not path.is_symlink():
            shutil.rmtree(path)
    return folder / name


def _compare_with_training(crossval: CrossValidation, load: Load, targets: SegmentationTargets) -> None:
    """Warn if the files or the networks are no longer those that were validated."""
    differing = []
    for number, case_id, validated_scores in crossval.cases:
        sample = load(f"{number}/{case_id}")
        scores = dice(sample.prediction, sample.reference, targets)
        for name, validated in validated_scores.items():
            if abs((scores.get(name) or 0) - (validated or 0)) > _TOLERANCE:
                differing.append(case_id)
                break
    if differing:
        log.warning(
            "Dice differs from that in training: %s; have the files of these cases changed since?",
            some(differing),
        )


def _write(path: Path, decision: Decision, targets: SegmentationTargets, crossval: CrossValidation) -> None:
    steps = []
    for verdict in decision.accepted:
        steps.append({**verdict.step.plain(), "evidence": verdict.plain()})
    rejected = []
    for verdict in decision.rejected:
        evidence = {"reason": verdict.reason, "evidence": verdict.plain()}
        rejected.append(verdict.step.plain() | evidence)
    content = {
        "steps": steps,
        "targets": targets.plain(),
        "dice": {"before": decision.before, "after": decision.after},
        "folds": {fold.number: fold.name for fold in crossval.folds},
        "rejected": rejected,
    }
    write_text(path, json.dumps(content, indent=2) + "\n")
