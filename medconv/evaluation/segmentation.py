"""Predicted against reference label maps: the metrics of every case, and their statistics per class."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from medconv import doors
from medconv.data.datasets.patterns import files_of, home
from medconv.data.io.label_values import relabels
from medconv.data.io.raster import check_ignored
from medconv.evaluation import labels, segmentation_results
from medconv.evaluation.case_measurement import (
    CaseMeasurement,
    LabelMaps,
    Settings,
    agreed_spacing,
    measure_cases,
)
from medconv.evaluation.raters import RATER_DICE, raters_of, summarize_raters
from medconv.evaluation.segmentation_results import CaseRow, LabelMapEvaluation, columns_of
from medconv.metrics.segmentation import VOLUMES, MetricSelection
from medconv.targets.segmentation import SegmentationTargets


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
        images: their folder; None: see `labels.images_of`.
        selection: further metrics; None: none.
        annotated: such as `siteA_*=liver`: other classes are undefined in these cases.
        raters: folder or pattern of the label maps of each further rater of the references.
        consensus: how the raters become one reference, see `consensus.CONSENSUS`; None: majority.
    Raises:
        ValueError: a folder without label maps, predictions without a reference, or label maps that cannot
            be measured; names all.
    """
    # The files of each case, and what their label values mean.
    prediction_sets = [LabelMaps(predictions, files_of(predictions, "predictions"))]
    if compare:
        prediction_sets.append(LabelMaps(compare, files_of(compare, "compare")))
    targets = labels.agreed_targets([maps.folder for maps in prediction_sets], home(references))
    class_names = labels.class_names_of(targets)
    ignore = targets.ignore if targets else None
    reference_files = labels.reference_files(
        references,
        [maps.files for maps in prediction_sets],
        partial(labels.label_files, class_names=class_names),
    )
    reference_set = LabelMaps(references, reference_files)
    renumbered = labels.renumbering(targets, reference_set.folder)
    settings = Settings(
        tolerance_mm or {},
        selection or MetricSelection(),
        annotated,
        raters_of(raters, consensus, reference_set.files, targets, annotated, renumbered),
    )
    # What can fail is checked before the work, not after it.
    if targets:
        labels.check_tolerances(settings.tolerances, targets.names)
        ignored = (targets.ignore, *targets.also_ignored)
        check_ignored(ignored, reference_files.values(), targets.num_values)
    # Masks of 0 and 255 are read as labels 0 and 1, and files that name their values by name.
    relabel = relabels(reference_files, class_names, ignore, renumbered)
    reference_files = labels.with_annotated_structures(reference_files, relabel, annotated, targets)
    reference_set = replace(reference_set, files=reference_files, relabel=relabel)
    prediction_sets = [
        replace(maps, relabel=relabels(maps.files, class_names, ignore)) for maps in prediction_sets
    ]
    first = prediction_sets[0]
    image_files = labels.images_of(first.folder, reference_set.folder, images, list(first.files))
    spacings = agreed_spacing(
        [maps.folder for maps in prediction_sets], {case for maps in prediction_sets for case in maps.files}
    )
    rows_of_sets = []
    for maps, spacing in zip(prediction_sets, spacings, strict=True):
        measurement = CaseMeasurement(maps, reference_set, targets, settings, spacing)
        rows_of_sets.append(measure_cases(maps.files, measurement.row, workers))
    # Where no file declares classes, they are the label values that the cases turn out to have.
    if targets is None:
        targets = labels.numbered({value for rows in rows_of_sets for row in rows for value in row["dice"]})
        labels.check_tolerances(settings.tolerances, targets.names)
        for row in chain.from_iterable(rows_of_sets):
            for column in VOLUMES:  # of a class that neither image has
                row[column] = {name: row[column].get(name, 0.0) for name in targets.names}
    _drop_not_annotated(rows_of_sets, reference_set, targets, settings)
    # The second set may lack a case.
    all_sets = (reference_set, *prediction_sets)
    files = {case: tuple(maps.files[case] for maps in all_sets if case in maps.files) for case in first.files}
    return LabelMapEvaluation(
        result=_result(prediction_sets, reference_set, rows_of_sets, targets, settings),
        files=files,
        images=image_files,
        states_spacing=spacings[0] is not None,
    )


def _drop_not_annotated(
    rows_of_sets: Sequence[Sequence[CaseRow]],
    references: LabelMaps,
    targets: SegmentationTargets,
    settings: Settings,
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
    prediction_sets: Sequence[LabelMaps],
    references: LabelMaps,
    rows_of_sets: Sequence[Sequence[CaseRow]],
    targets: SegmentationTargets,
    settings: Settings,
) -> dict[str, Any]:
    """The content of the JSON file."""
    summaries = [
        segmentation_results.summarize(predictions.path, rows, targets.names, settings.selection)
        for predictions, rows in zip(prediction_sets, rows_of_sets, strict=True)
    ]
    # Dice against each rater, to be compared with that among them.
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
    # What features measure of files beside the predictions, such as predicted quality.
    for feature in doors.objects(doors.EVALUATIONS):
        measured = feature.measure(first.folder, summaries[0]["cases"], targets.names)
        if measured is not None:
            result[feature.KEY] = measured
    if len(summaries) > 1:
        result["compare"] = summaries[1]
        result["comparison"] = segmentation_results.compare(summaries[0], summaries[1], settings.selection)
    return result
