"""Decide by cross-validation which post-processing of the predictions helps."""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from tqdm import tqdm

from medconv import config as configs
from medconv.data.case import Case, Dataset
from medconv.data.datasets.decathlon import msd
from medconv.data.datasets.phantom import phantom
from medconv.data.io.images import check_same_grid, read_label
from medconv.evaluation import cross_validation, postprocessing_search
from medconv.evaluation.cross_validation import CrossValidation, Fold
from medconv.evaluation.postprocessing_search import Decision, Sample
from medconv.inference.predict import digest, predict, usable_device
from medconv.inference.predictor import Predictor
from medconv.metrics.dice import dice
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils import signals
from medconv.utils.atomic_io import write_text
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import shown, some, start_logging

_LAYOUTS = tuple(  # each by its full name: other functions beside them write files
    f"medconv.data.datasets.{name}"
    for name in ("auto.auto", "decathlon.msd", "folder.folder", "nnunet.nnunet", "phantom.phantom")
)
_IN_MEMORY = 2**31  # bytes of label maps that are read only once
_APART = 0.02  # Dice; what another device may change

log = logging.getLogger(__name__)


def run_command(options: argparse.Namespace) -> int:
    """`medconv find-postprocessing` with these options. Returns: the exit code."""
    start_logging()
    device = usable_device(options.device)
    everything = cross_validation.read(options.runs)
    found = _chosen(everything, options.runs, options.select)
    if found.image_targets is not None:
        raise ValueError(
            f"{options.runs}: its networks answer for whole images, and post-processing is of label maps"
        )
    ending = f"-{found.key}" if len(everything) > 1 else ""
    labelled = _cases(found, options.runs, options.trust_package)
    with signals.raising():
        predictions, targets = _predicted(
            found, labelled, options.runs / f"validation{ending}", options.trust_package, device
        )
        load = Loader(predictions, {case: labelled[case].label for case in labelled})
        _compare_with_training(found, load, targets)
        ids = list(predictions)
        tried = postprocessing_search.candidates(
            postprocessing_search.volumes(load, ids, targets, _bar), targets
        )
        decision = postprocessing_search.decide(load, ids, targets, tried, _bar)
    print(f"Dice over {len(ids)} cases, each predicted by the network that was not trained on it")
    print(
        "(1 where prediction and reference are both without the "
        f"class)\n\n{shown(postprocessing_search.table(decision))}\n"
    )
    for name, before in decision.before.items():
        print(shown(f"  {name:<20} {before:.4f} -> {decision.after[name]:.4f}"))
    path = options.runs / f"postprocessing{ending}.json"
    _write(path, decision, targets, found)
    print(f"\nsteps kept: {len(decision.kept)}, in {path}")
    words = [
        "medconv",
        "predict",
        "--checkpoint",
        *(str(fold.folder.best) for fold in found.folds),
        "--postprocess",
        str(path),
    ]
    print(f"to predict with all folds:\n{shown(shlex.join(words))} --input IMAGES --output PREDICTIONS")
    return DONE


class Loader:
    """Prediction and reference by fold and case, cropped; small datasets stay in memory.

    Args: predictions: `FOLD/CASE` to the file. references: case to the file.
    """

    def __init__(self, predictions: Mapping[str, Path], references: Mapping[str, Path | None]) -> None:
        self.predictions, self.references = predictions, references
        self._kept: dict[str, Sample] = {}
        self._bytes = 0

    def __call__(self, name: str) -> Sample:
        if name in self._kept:
            return self._kept[name]
        path, label = self.predictions[name], self.references[name.split("/", 1)[1]]
        assert label is not None
        (prediction, grid), (reference, wanted) = read_label(path), read_label(label)
        check_same_grid(label, wanted, path, grid)
        sample = Sample(prediction, reference, grid).cropped()
        self._bytes += sample.prediction.nbytes + sample.reference.nbytes
        if self._bytes <= _IN_MEMORY:
            self._kept[name] = sample
        return sample


def _chosen(found: Sequence[CrossValidation], home: Path, only: str | None) -> CrossValidation:
    """Raises: ValueError: no cross-validation there, more than one, or one that is not complete."""
    if not found:
        raise ValueError(
            f"--runs {home}: no folds of a cross-validation there; medconv train -m data.fold=0,1,2,3,4 "
            "leaves them"
        )
    names = " or ".join(repr(one.label or one.key) for one in found)
    chosen = [one for one in found if only is None or only in (one.label, one.key)]
    if len(chosen) != 1:
        said = (
            "more than one cross-validation there" if only is None else f"none of them is --select {only!r}"
        )
        raise ValueError(f"--runs {home}: {said}; choose by --select {names}")
    print(shown(cross_validation.table(chosen[0])) + "\n")
    if chosen[0].missing:
        said = ", ".join(f"{number} ({state})" for number, state in chosen[0].missing.items())
        raise ValueError(
            f"--runs {home}: fold {said} is missing; each must be trained to its end, on the same classes"
        )
    for fold in chosen[0].folds:
        if not fold.folder.best.is_file():
            raise ValueError(
                f"{fold.folder.best}: no such checkpoint, which fold {fold.number} is to be predicted by"
            )
    return chosen[0]


def _cases(found: CrossValidation, home: Path, trusted: Sequence[str]) -> dict[str, Case]:
    """The validated cases, as the config's dataset has them now. Raises: ValueError: some are not there
    any more.
    """
    by_id = {case.id: case for case in _layout(found.folds[0].values, trusted).cases}
    wanted = [case for _, case, _ in found.cases]
    lost = [case for case in wanted if case not in by_id or by_id[case].label is None]
    if lost:
        root = found.folds[0].values.get("data.root") or found.folds[0].values.get("data.images")
        raise ValueError(
            f"{root}: not the dataset of {home}, it lacks {len(lost)} of {len(wanted)} cases: {some(lost)}"
        )
    return {case: by_id[case] for case in wanted}


def _layout(values: Mapping[str, Any], trusted: Sequence[str]) -> Dataset:
    """The dataset that a run's config names; its arguments are taken as they are, never as something to build
    or call.

    Raises: ConfigError: its layout is a function of a package not trusted, or names more to be called.
    """
    node = {
        key.removeprefix("data.layout."): value
        for key, value in values.items()
        if key.startswith("data.layout.")
    }
    target = str(node.get("_target_"))
    from_trusted = target.startswith(tuple(f"{name}." for name in trusted))
    home = str(getattr(get_object(target), "__module__", "")) if from_trusted else ""
    if target not in _LAYOUTS and not any(home == name or home.startswith(f"{name}.") for name in trusted):
        raise configs.ConfigError(
            f"data.layout._target_={target} is refused; trust your own package by --trust-package NAME"
        )
    arguments = {key: value for key, value in node.items() if not key.startswith("_")}
    for where, more in configs.iter_targets(arguments, "data.layout"):
        raise configs.ConfigError(f"{where}={more} is refused: a layout takes plain values")
    function = get_object(target)
    if function is phantom:  # is there, or was not what was trained on: nothing is written here
        function, arguments = msd, {"root": arguments.get("root")}
    try:
        found = function(**arguments)
    except (TypeError, AttributeError) as error:
        raise configs.ConfigError(
            f"data.layout: {target} cannot be called with {arguments!r:.200} ({error})"
        ) from error
    if not isinstance(found, Dataset):
        raise configs.ConfigError(
            f"data.layout._target_={target} is no layout: it gives {type(found).__name__}"
        )
    return found


def _predicted(
    found: CrossValidation, cases: Mapping[str, Case], home: Path, trusted: Sequence[str], device: str
) -> tuple[dict[str, Path], SegmentationTargets]:
    """Every fold's cases, predicted by its best checkpoint where that is not done yet: `FOLD/CASE` to the
    file.
    """
    predictions: dict[str, Path] = {}
    targets: SegmentationTargets | None = None
    for fold in found.folds:
        predictor = Predictor.load([fold.folder.best], device, trusted)
        if targets is not None and predictor.targets != targets:
            raise ValueError(f"{fold.folder.best}: gives other classes than the other folds' checkpoints")
        targets = predictor.targets
        folder = _folder(home, fold)
        log.info("fold %s: %s", fold.number, fold.folder.best)
        predict(predictor, [cases[case] for case in fold.rows], folder)
        predictions |= {f"{fold.number}/{case}": folder / f"{case}.nii.gz" for case in fold.rows}
    assert targets is not None
    return predictions, targets


def _folder(home: Path, fold: Fold) -> Path:
    """Where a fold's predictions go; those of an earlier checkpoint of the same fold are removed."""
    name = f"fold{int(fold.number)}-{digest(fold.folder.best)[:8]}"
    ours = re.compile(f"fold{int(fold.number)}-[0-9a-f]{{8}}")
    for other in home.iterdir() if home.is_dir() else ():
        if ours.fullmatch(other.name) and other.name != name and not other.is_symlink():
            shutil.rmtree(other)
    return home / name


def _compare_with_training(found: CrossValidation, load: Loader, targets: SegmentationTargets) -> None:
    """A warning where the files, or the networks, are no longer what was validated."""
    other = []
    for number, case, row in found.cases:
        sample = load(f"{number}/{case}")
        now = dice(sample.prediction, sample.reference, targets)
        if any(abs((now.get(name) or 0) - (value or 0)) > _APART for name, value in row.items()):
            other.append(case)
    if other:
        names = some(other)
        log.warning(
            "Dice of %d cases is not what training found: %s; were their files replaced since?",
            len(other),
            names,
        )


def _write(path: Path, decision: Decision, targets: SegmentationTargets, found: CrossValidation) -> None:
    content = {
        "steps": [{**verdict.step.plain(), "evidence": verdict.plain()} for verdict in decision.kept],
        "targets": targets.plain(),
        "dice": {"before": decision.before, "after": decision.after},
        "folds": {fold.number: fold.name for fold in found.folds},
        "rejected": [
            {**v.step.plain(), "reason": v.reason, "evidence": v.plain()} for v in decision.rejected
        ],
    }
    write_text(path, json.dumps(content, indent=2) + "\n")


def _bar(cases: Sequence[str], what: str) -> Iterable[str]:
    return tqdm(cases, desc=what, unit="case", leave=False, disable=None)
