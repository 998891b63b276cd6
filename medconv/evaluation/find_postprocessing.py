"""`medconv find-postprocessing`: find by cross-validation which post-processing improves the predictions."""

import argparse
import json
import logging
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import get_object

from medconv import config as configs
from medconv.data.case import Case, Dataset
from medconv.data.datasets.decathlon import msd
from medconv.data.datasets.phantom import phantom
from medconv.data.io.grids import on_grid
from medconv.data.io.images import read_label
from medconv.evaluation import cross_validation, cross_validation_report, labels
from medconv.evaluation.cross_validation import CrossValidation, Fold
from medconv.evaluation.postprocessing_search import (
    Decision,
    LabelledCase,
    Load,
    candidates,
    decide,
    table,
    volumes,
)
from medconv.inference.exported.metadata import digest
from medconv.inference.output_dir import OutputDir
from medconv.inference.predict import output_in, predict, usable_device
from medconv.inference.predictor import Predictor
from medconv.metrics.dice import dice
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils import signals
from medconv.utils.atomic_io import write_text
from medconv.utils.errors import explained
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import shown, some, start_logging
from medconv.utils.progress import track

_JOINED = "medconv.data.datasets.joined.joined"
_LAYOUTS = tuple(  # each by its full name, since other functions beside them write files
    f"medconv.data.datasets.{name}"
    for name in ("auto.auto", "decathlon.msd", "folder.folder", "nnunet.nnunet", "phantom.phantom")
)
_CACHE_BYTES = 2**31  # of label maps that stay in memory
_TOLERANCE = 0.02  # Dice; differences that another device may cause

log = logging.getLogger(__name__)


def run_command(options: argparse.Namespace) -> int:
    """`medconv find-postprocessing` with these options. Returns: the exit code."""
    start_logging()
    device = usable_device(options.device)
    crossvals = cross_validation.read(options.runs)
    crossval = _chosen(crossvals, options.runs, options.select)
    if not crossval.targets.per_voxel:
        raise ValueError(
            f"{options.runs}: post-processing is for segmentation, these runs have {crossval.targets.kind} "
            "targets"
        )
    ending = f"-{crossval.key}" if len(crossvals) > 1 else ""
    labelled = _cases(crossval, options.runs, options.trust_package)
    with signals.raising():
        home = options.runs / f"validation{ending}"
        predictions, targets = _predicted(crossval, labelled, home, options.trust_package, device)
        load = _loader(predictions, labelled)
        _compare_with_training(crossval, load, targets)
        ids = list(predictions)
        tried = candidates(volumes(load, ids, targets, track), targets)
        decision = decide(load, ids, targets, tried, track)
    print(f"Dice over {len(ids)} cases, each predicted by the network that was not trained on it")
    print(f"(1 where neither prediction nor reference has the class)\n\n{shown(table(decision))}\n")
    for name, before in decision.before.items():
        print(shown(f"  {name:<20} {before:.4f} -> {decision.after[name]:.4f}"))
    path = options.runs / f"postprocessing{ending}.json"
    _write(path, decision, targets, crossval)
    print(f"\nsteps kept: {len(decision.accepted)}, in {path}")
    files = shlex.join([*(str(fold.folder.best) for fold in crossval.folds), "--postprocess", str(path)])
    command = f"medconv predict --checkpoint {shown(files)}"
    print(f"to predict with all folds:\n{command} --input IMAGES --output PREDICTIONS")
    return DONE


def _loader(predictions: Mapping[str, Path], cases: Mapping[str, Case]) -> Load:
    """Prediction and reference by `FOLD/CASE`, cropped; small datasets stay in memory."""
    cache: dict[str, LabelledCase] = {}
    stated = {folder: labels.stated_spacing(folder) for folder in {p.parent for p in predictions.values()}}

    def load(name: str) -> LabelledCase:
        if name in cache:
            return cache[name]
        path, label = predictions[name], cases[name.split("/", 1)[1]].label
        assert label is not None
        (prediction, grid), (reference, reference_grid) = read_label(path), read_label(label, path)
        reference = on_grid(reference, path, grid, label, reference_grid)
        grid = labels.stated_grid(grid, stated[path.parent], name.split("/", 1)[1])
        sample = LabelledCase(prediction, reference, grid).cropped()
        if sum(s.prediction.nbytes + s.reference.nbytes for s in (*cache.values(), sample)) <= _CACHE_BYTES:
            cache[name] = sample
        return sample

    return load


def _chosen(crossvals: Sequence[CrossValidation], home: Path, select: str | None) -> CrossValidation:
    """Raises: ValueError: no cross-validation there, more than one, or one that is not complete."""
    if not crossvals:
        raise ValueError(
            f"--runs {home}: no folds of a cross-validation there; train them by medconv train -m "
            "data.fold=0,1,2,3,4"
        )
    chosen = [one for one in crossvals if select is None or select in (one.label, one.key)]
    if len(chosen) != 1:
        names = " or ".join(repr(one.label or one.key) for one in crossvals)
        which = "more than one cross-validation there" if chosen else f"none of them is --select {select!r}"
        raise ValueError(f"--runs {home}: {which}; choose by --select {names}")
    (crossval,) = chosen
    print(shown(cross_validation_report.table(crossval)) + "\n")
    if crossval.missing:
        missing = ", ".join(f"{number} ({state})" for number, state in crossval.missing.items())
        raise ValueError(
            f"--runs {home}: fold {missing} is missing; each must be trained to its end, on the same classes"
        )
    for fold in crossval.folds:
        if not (best := fold.folder.best).is_file():
            raise ValueError(f"{best}: no such checkpoint; it is needed to predict fold {fold.number}")
    return crossval


def _cases(crossval: CrossValidation, home: Path, trusted: Sequence[str]) -> dict[str, Case]:
    """The validated cases, from the dataset that the config names. Raises: ValueError: it lacks some now."""
    values = crossval.folds[0].values
    for key, value in values.items():
        if (key.startswith("data.annotated") and value is not None) or str(value) == _JOINED:
            raise configs.ConfigError(
                f"{key}={value}: no post-processing is searched where cases lack labels"
            )
        if key == "data.ignore_label" and isinstance(value, list):
            raise configs.ConfigError(f"{key}={value}: post-processing is searched with one value to ignore")
    by_id = {case.id: case for case in _layout(crossval.folds[0].config, trusted).cases}
    validated = [case for _, case, _ in crossval.cases]
    missing = [case for case in validated if case not in by_id or by_id[case].label is None]
    if missing:
        root = values.get("data.root") or values.get("data.images")
        raise ValueError(
            f"{root}: not the dataset of {home}, it lacks {len(missing)} of {len(validated)} cases: "
            f"{some(missing)}"
        )
    return {case: by_id[case] for case in validated}


def _layout(config: Mapping[str, Any], trusted: Sequence[str]) -> Dataset:
    """The dataset that a run's config names; its arguments are values, never something to build or call.

    Raises: ConfigError: its layout is a function of a package not trusted, or names more to be called.
    """
    data = config.get("data")
    layout = data.get("layout") if isinstance(data, Mapping) else None
    node = layout if isinstance(layout, Mapping) else {}
    target = str(node.get("_target_"))
    from_trusted = target.startswith(tuple(f"{name}." for name in trusted))
    home = str(getattr(get_object(target), "__module__", "")) if from_trusted else ""
    if target not in _LAYOUTS and not any(home == name or home.startswith(f"{name}.") for name in trusted):
        raise configs.ConfigError(f"data.layout._target_={target} is refused; see --trust-package NAME")
    arguments = {key: value for key, value in node.items() if not key.startswith("_")}
    for where, more in configs.iter_targets(arguments, "data.layout"):
        raise configs.ConfigError(f"{where}={more} is refused: a layout takes plain values")
    function = get_object(target)
    if function is phantom:  # is there, or was not what was trained on: nothing is written here
        function, arguments = msd, {"root": arguments.get("root")}
    problem = f"data.layout: {target} cannot be called with {arguments!r:.200}"
    with explained(problem, TypeError, AttributeError):
        dataset = function(**arguments)
    if not isinstance(dataset, Dataset):
        kind = type(dataset).__name__
        raise configs.ConfigError(f"data.layout._target_={target} is not a layout: it returns {kind}")
    return dataset


def _predicted(
    crossval: CrossValidation, cases: Mapping[str, Case], home: Path, trusted: Sequence[str], device: str
) -> tuple[dict[str, Path], SegmentationTargets]:
    """Predict every fold's cases by its best checkpoint, if that is not done yet.

    Returns: `FOLD/CASE` to the label map, and the targets.
    """
    predictions: dict[str, Path] = {}
    targets: SegmentationTargets | None = None
    for fold in crossval.folds:
        predictor = Predictor.load([fold.folder.best], device, trusted)
        if targets is not None and predictor.targets != targets:
            raise ValueError(f"{fold.folder.best}: its classes differ from those of the other folds")
        assert isinstance(predictor.targets, SegmentationTargets)  # as the folds' checkpoints have them
        targets, folder = predictor.targets, _folder(home, fold)
        log.info("fold %s: %s", fold.number, fold.folder.best)
        output = output_in(folder, predictor)
        assert isinstance(output, OutputDir)  # of label maps
        predict(predictor, [cases[case] for case in fold.rows], output)
        predictions |= {f"{fold.number}/{case}": output.label(case) for case in fold.rows}
    assert targets is not None
    return predictions, targets


def _folder(home: Path, fold: Fold) -> Path:
    """The folder for a fold's predictions; removes predictions of an earlier checkpoint of the same fold."""
    name = f"fold{int(fold.number)}-{digest(fold.folder.best)[:8]}"
    same_fold = re.compile(f"fold{int(fold.number)}-[0-9a-f]{{8}}")
    for other in home.iterdir() if home.is_dir() else ():
        if same_fold.fullmatch(other.name) and other.name != name and not other.is_symlink():
            shutil.rmtree(other)
    return home / name


def _compare_with_training(crossval: CrossValidation, load: Load, targets: SegmentationTargets) -> None:
    """Warn if the files or the networks are no longer those that were validated."""
    differing = []
    for number, case, row in crossval.cases:
        sample = load(f"{number}/{case}")
        now = dice(sample.prediction, sample.reference, targets)
        if any(abs((now.get(name) or 0) - (value or 0)) > _TOLERANCE for name, value in row.items()):
            differing.append(case)
    if differing:
        what = "Dice of %d cases differs from that in training: %s; have their files changed since?"
        log.warning(what, len(differing), some(differing))


def _write(path: Path, decision: Decision, targets: SegmentationTargets, crossval: CrossValidation) -> None:
    content = {
        "steps": [{**v.step.plain(), "evidence": v.plain()} for v in decision.accepted],
        "targets": targets.plain(),
        "dice": {"before": decision.before, "after": decision.after},
        "folds": {fold.number: fold.name for fold in crossval.folds},
        "rejected": [v.step.plain() | {"reason": v.reason, "evidence": v.plain()} for v in decision.rejected],
    }
    write_text(path, json.dumps(content, indent=2) + "\n")
