"""Predicted against reference label maps: the metrics of every case, and their statistics per class."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Grid
from medconv.data.datasets.patterns import home
from medconv.data.io.grids import on_grid
from medconv.data.io.images import read_label
from medconv.data.io.label_values import Relabel, relabel_of
from medconv.data.io.raster import check_ignored
from medconv.evaluation import labels, predicted_quality, segmentation_summary
from medconv.evaluation.overlays import images_of
from medconv.evaluation.raters import (
    RATER_DICE,
    Raters,
    checked,
    numbered_of,
    rater_dice,
    raters_of,
    summarize_raters,
)
from medconv.evaluation.segmentation_results import LabelMapEvaluation
from medconv.evaluation.segmentation_summary import CaseRow, columns_of
from medconv.evaluation.stated_spacing import agreed_spacing, stated_grid
from medconv.metrics.segmentation import measure
from medconv.metrics.segmentation_metrics import MetricSelection
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.threads import each


@dataclass(frozen=True)
class _LabelMaps:
    """Predictions of one network, or references.

    Args:
        path: folder, or pattern with `{id}`.
        files: case to label map.
        relabel: see `label_values.relabel_of`.
    """

    path: Path
    files: Mapping[str, Path]
    relabel: Relabel | None = None

    def read(self, case: str, like: Path | None = None) -> tuple[np.ndarray, Grid]:
        """A label map and its grid. Raises: ValueError: as `read_label`, or a value that is not declared."""
        return read_label(self.files[case], like, self.relabel)

    @property
    def folder(self) -> Path:
        return home(self.path)


@dataclass(frozen=True)
class _Settings:
    """What is measured.

    Args:
        tolerances: of the surface Dice in mm, by class; None stands for all other classes.
        selection: further metrics.
        annotated: such as `siteA_*=liver`: other classes are undefined in these cases.
        raters: of the references.
    """

    tolerances: Mapping[str | None, float]
    selection: MetricSelection
    annotated: Sequence[str]
    raters: Raters


def evaluate(
    predictions: Path,
    references: Path,
    compare: Path | None = None,
    tolerance_mm: Mapping[str | None, float] | None = None,
    workers: int = 1,
    images: Path | None = None,
    selection: MetricSelection | None = None,
    annotated: Sequence[str] = (),
    raters: Sequence[Path] = (),
    consensus: str | None = None,
) -> LabelMapEvaluation:
    """Measure every prediction against the reference of the same case id.

    Args:
        predictions: folder of label maps, or a pattern with `{id}`, see `patterns.files_of`.
        references: folder or pattern of the references.
        compare: folder or pattern of other predictions, which are measured and compared.
        tolerance_mm: of the surface Dice, by class; None stands for all other classes.
        workers: cases measured at once.
        images: their folder; None: see `overlays.images_of`.
        selection: further metrics; None: none.
        annotated: such as `siteA_*=liver`: other classes are undefined in these cases.
        raters: folder or pattern of the label maps of each further rater of the references.
        consensus: how the raters become one reference, see `consensus.CONSENSUS`; None: majority.
    Raises:
        ValueError: a folder without label maps, predictions without a reference, or label maps that cannot
            be measured; names all.
    """
    prediction_sets = _prediction_sets(predictions, compare)
    reference_set = _reference_set(references, prediction_sets)
    targets = labels.agreed_targets(
        [maps.folder for maps in prediction_sets],
        reference_set.folder,
    )
    num_values = targets.num_values if targets else None
    settings = _Settings(
        tolerance_mm or {},
        selection or MetricSelection(),
        annotated,
        raters_of(raters, consensus, reference_set.files, num_values),
    )
    reference_set = _with_annotated_structures(reference_set, targets, settings)
    if targets:  # without them, the classes are those that the cases turn out to have
        _check_targets(targets, reference_set, settings)
    reference_set = _with_relabel(reference_set, num_values)
    prediction_sets = [_with_relabel(maps, num_values) for maps in prediction_sets]
    first = prediction_sets[0]
    image_files = images_of(first.folder, reference_set.folder, images, list(first.files))
    rows_of_sets = _measure_sets(
        prediction_sets,
        reference_set,
        targets,
        settings,
        workers,
    )
    targets = targets or _numbered_targets(rows_of_sets)
    labels.check_tolerances(settings.tolerances, targets.names)
    _drop_not_annotated(rows_of_sets, reference_set, targets, settings)
    return LabelMapEvaluation(
        result=_result(prediction_sets, reference_set, rows_of_sets, targets, settings),
        files=_files_of_cases(prediction_sets, reference_set),
        images=image_files,
    )


def _prediction_sets(predictions: Path, compare: Path | None) -> list[_LabelMaps]:
    sets = [_LabelMaps(predictions, labels.case_files(predictions, "predictions"))]
    if compare:
        sets.append(_LabelMaps(compare, labels.case_files(compare, "compare")))
    return sets


def _reference_set(
    references: Path,
    prediction_sets: Sequence[_LabelMaps],
) -> _LabelMaps:
    """The references. Raises: ValueError: predictions without a reference."""
    files = labels.case_files(references, "references")
    predicted_cases = {case for predictions in prediction_sets for case in predictions.files}
    missing = sorted(predicted_cases - set(files))
    if missing:
        raise ValueError(f"references {references}: no label map there for {', '.join(missing[:20])}")
    return _LabelMaps(references, files)


def _with_annotated_structures(
    references: _LabelMaps,
    targets: SegmentationTargets | None,
    settings: _Settings,
) -> _LabelMaps:
    files = labels.with_annotated_structures(
        references.files,
        settings.annotated,
        targets,
    )
    return replace(references, files=files)


def _with_relabel(maps: _LabelMaps, num_values: int | None) -> _LabelMaps:
    return replace(maps, relabel=relabel_of(maps.files.values(), num_values))


def _check_targets(
    targets: SegmentationTargets,
    references: _LabelMaps,
    settings: _Settings,
) -> None:
    """Fail before the work, not after it."""
    labels.check_tolerances(settings.tolerances, targets.names)
    for value in (targets.ignore, *targets.also_ignored):
        check_ignored(value, references.files.values())


def _measure_sets(
    prediction_sets: Sequence[_LabelMaps],
    references: _LabelMaps,
    targets: SegmentationTargets | None,
    settings: _Settings,
    workers: int,
) -> list[list[CaseRow]]:
    """A row per case, for each set of predictions."""
    folders = [predictions.folder for predictions in prediction_sets]
    cases = {case for predictions in prediction_sets for case in predictions.files}
    # the same reference is measured with one spacing in both sets
    rows_of_sets = []
    for predictions, spacing in zip(prediction_sets, agreed_spacing(folders, cases), strict=True):
        measurement = _CaseMeasurement(
            predictions,
            references,
            targets,
            settings,
            spacing,
        )
        rows_of_sets.append(_measure_cases(measurement, workers))
    return rows_of_sets


@dataclass(frozen=True)
class _CaseMeasurement:
    """Measures cases of one set of predictions.

    Args:
        targets: None: the label values of each case are its classes.
        stated_spacing: what `data.source_spacing_mm` stated of the images.
    """

    predictions: _LabelMaps
    references: _LabelMaps
    targets: SegmentationTargets | None
    settings: _Settings
    stated_spacing: Any

    def row(self, case: str) -> CaseRow:
        """Metric to class to value. Raises: ValueError: the case cannot be measured."""
        prediction_file = self.predictions.files[case]
        reference_file = self.references.files[case]
        prediction, prediction_grid = self.predictions.read(case)
        reference, grid = self.references.read(case, prediction_file)
        # In one order, as `on_grid` gives the prediction: voxels that lie apart in memory take longer.
        reference = np.ascontiguousarray(reference)
        prediction = on_grid(
            prediction,
            reference_file,
            grid,
            prediction_file,
            prediction_grid,
        )
        references = {str(self.references.path): (reference_file, reference)}
        references |= self.settings.raters.label_maps(case, prediction_file, reference_file, grid)
        targets = self.targets or numbered_of([prediction, *(label for _, label in references.values())])
        labels.check_declared(prediction_file, prediction, targets)
        label_maps = checked(references, targets)
        reference = self.settings.raters.reference(list(label_maps.values()), targets.ignore)
        scores = measure(
            prediction,
            reference,
            stated_grid(grid, self.stated_spacing, case),
            targets,
            tolerance_mm=labels.tolerance_of(self.settings.tolerances, targets.names),
            selection=self.settings.selection,
        )
        if len(label_maps) > 1:
            scores |= rater_dice(prediction, label_maps, targets)
        return {"case": case, **scores}


def _measure_cases(measurement: _CaseMeasurement, workers: int) -> list[CaseRow]:
    """A row per case. Raises: ValueError: all cases that cannot be measured."""

    def row_or_error(case: str) -> CaseRow | str:
        try:
            return measurement.row(case)
        except ValueError as error:
            return f"  case {case}: {error}"

    # collect the errors of all cases, so that a user can mend all files at once
    cases = list(measurement.predictions.files)
    results = list(each(row_or_error, cases, workers, "evaluating"))
    errors = [result for result in results if isinstance(result, str)]
    if errors:
        raise ValueError(f"{len(errors)} of {len(cases)} cases cannot be evaluated\n" + "\n".join(errors))
    return [result for result in results if not isinstance(result, str)]


def _numbered_targets(rows_of_sets: Sequence[Sequence[CaseRow]]) -> SegmentationTargets:
    """A class for each label value of any case."""
    values: set[str] = set()
    for rows in rows_of_sets:
        for row in rows:
            values.update(row["dice"])
    return labels.numbered(values)


def _drop_not_annotated(
    rows_of_sets: Sequence[Sequence[CaseRow]],
    references: _LabelMaps,
    targets: SegmentationTargets,
    settings: _Settings,
) -> None:
    """Make the values of classes that are not annotated in a case's reference undefined."""
    annotated = labels.annotated(settings.annotated, references.files, targets.names)
    for rows in rows_of_sets:
        for row in rows:
            if row["case"] not in annotated:
                continue
            names = annotated[row["case"]]
            of_raters = row.get(RATER_DICE, {})
            for table, column in [
                *((row, column) for column in columns_of(settings.selection)),
                *((of_raters, rater) for rater in of_raters),
            ]:
                scores = table[column]
                table[column] = {n: scores.get(n) if n in names else None for n in targets.names}


def _result(
    prediction_sets: Sequence[_LabelMaps],
    references: _LabelMaps,
    rows_of_sets: Sequence[Sequence[CaseRow]],
    targets: SegmentationTargets,
    settings: _Settings,
) -> dict[str, Any]:
    """The content of the JSON file."""
    summaries = [
        segmentation_summary.summarize(predictions.path, rows, targets.names, settings.selection)
        for predictions, rows in zip(prediction_sets, rows_of_sets, strict=True)
    ]
    for summary, rows in zip(summaries, rows_of_sets, strict=True):
        summary |= summarize_raters(rows, targets.names, settings.raters.consensus)
    first = prediction_sets[0]
    result = {
        **summaries[0],
        "references": str(references.path),
        "targets": targets.plain(),
        "tolerance_mm": labels.tolerance_of(settings.tolerances, targets.names),
        **asdict(settings.selection),
        "without_prediction": sorted(set(references.files) - set(first.files)),
    }
    result |= _quality(first, summaries[0]["cases"], targets.names)
    if len(summaries) > 1:
        result["compare"] = summaries[1]
        result["comparison"] = segmentation_summary.compare(
            summaries[0],
            summaries[1],
            settings.selection,
        )
    return result


def _quality(
    predictions: _LabelMaps,
    cases: Sequence[CaseRow],
    names: Sequence[str],
) -> dict[str, Any]:
    """The key `quality`, where the network predicted its own Dice."""
    predicted_dice = predicted_quality.read(
        predictions.folder,
        names,
        list(predictions.files),
    )
    if not predicted_dice:
        return {}
    true_dice = {row["case"]: row["dice"] for row in cases}
    per_class = predicted_quality.compared(predicted_dice, true_dice, names)
    method = predicted_quality.method(predictions.folder, list(predicted_dice))
    return {"quality": {"method": method, "per_class": per_class, "cases": predicted_dice}}


def _files_of_cases(
    prediction_sets: Sequence[_LabelMaps],
    references: _LabelMaps,
) -> dict[str, tuple[Path, ...]]:
    """Case to its reference and its predictions."""
    files = {}
    for case in prediction_sets[0].files:
        label_map_sets = (references, *prediction_sets)  # the second set may lack a case
        files[case] = tuple(maps.files[case] for maps in label_map_sets if case in maps.files)
    return files
