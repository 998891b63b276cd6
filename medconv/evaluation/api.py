"""Evaluation from Python: `medconv.evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from medconv.evaluation import arrays, labels, segmentation
from medconv.evaluation.results import Evaluation, of_table, own_evaluation
from medconv.evaluation.segmentation_results import class_rows, columns_of
from medconv.metrics.segmentation import MetricSelection
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import ArgumentError

# A folder or pattern of label maps, a table, or label maps: one, several, or by case.
Predictions = Path | str | np.ndarray | Sequence[np.ndarray] | Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ScoreTable:
    """Scores of predictions; None where a score is undefined.

    Args:
        rows: `pandas.DataFrame(table.rows)` is a table: of label maps a row per case and class with each
            metric, distances in mm, volumes in ml; of image-level predictions a row per case.
        mean: metric to value: for label maps the mean over cases, then over classes.
        per_class: class to metric to its mean over the cases; for image-level predictions to its value.
    """

    rows: list[dict[str, Any]]
    mean: dict[str, float | None]
    per_class: dict[str, dict[str, Any]] = field(repr=False)

    @classmethod
    def of(cls, evaluation: Evaluation) -> ScoreTable:
        """The scores of an evaluation of files."""
        header, *rows = evaluation.csv_rows()
        result = evaluation.result
        return cls(
            rows=[dict(zip(header, row, strict=True)) for row in rows],
            mean=result["mean"],
            per_class=result["per_class"],
        )


def evaluate(
    predictions: Predictions,
    references: Predictions,
    *,
    spacing_mm: arrays.Spacing | None = None,
    targets: SegmentationTargets | Sequence[str] | None = None,
    tolerance_mm: float | Mapping[str, float] = 1.0,
    lesion_iou: float | None = None,
    centreline: bool = False,
    workers: int = 1,
    raters: Sequence[Path | str] = (),
    consensus: str | None = None,
) -> ScoreTable:
    """Scores of predictions against references, the same numbers as `medconv evaluate` gives.

    Shape: arrays are integer label maps, (X, Y, Z) or (X, Y).

    Args:
        predictions: one array, a list, or a dictionary by case; or a folder of label maps, a pattern with
            `{id}`, or the table (.csv) or folder that `medconv predict` wrote for image-level predictions.
        references: the same kind; for image-level predictions the table (.csv) of labels.
        spacing_mm: of the axes of arrays, in mm; for all cases, or a dictionary by case.
        targets: of arrays: a model's `targets`, or names of the classes from label value 0, the background,
            on; None: each label value is a class. Files say it themselves.
        tolerance_mm: of the surface Dice, for all classes, or a dictionary by class; others have 1 mm.
        lesion_iou: also lesion-wise scores; lesions match from this intersection over union on.
        centreline: also clDice, for thin structures.
        workers: files measured at once.
        raters: folder or pattern of label maps by each further rater of the references.
        consensus: how the raters become one reference, `majority` or `staple`; None: majority.
    Raises:
        ValueError: predictions without a reference, or that cannot be measured; names them.
    Source:
        Metrics and missing classes as in Reinke et al. 2024, doi:10.1038/s41592-023-02150-0.
    """
    if lesion_iou is not None and not 0 < lesion_iou <= 1:
        raise ArgumentError("lesion_iou", f" must be above 0 and at most 1, got {lesion_iou}")
    selection = MetricSelection(lesion_iou, centreline)
    tolerances = _tolerances(tolerance_mm)
    if isinstance(predictions, (str, Path)) and isinstance(references, (str, Path)):
        if spacing_mm is not None or targets is not None:
            raise ArgumentError("spacing_mm", " and targets are for arrays; files have their own")
        return _of_files(
            Path(predictions),
            Path(references),
            tolerance_mm=tolerances,
            selection=selection,
            workers=workers,
            raters=[Path(rater) for rater in raters],
            consensus=consensus,
        )
    if raters or consensus:
        raise ArgumentError("raters", " and consensus are for files; medconv.metrics.consensus has arrays")
    if isinstance(predictions, (str, Path)) or isinstance(references, (str, Path)):
        raise ArgumentError("references", " and predictions must both be files, or both be arrays")
    if spacing_mm is None:
        raise ArgumentError("spacing_mm", " is needed for arrays: distances are in mm")
    result = arrays.evaluate(
        arrays.by_case(predictions, "predictions"),
        arrays.by_case(references, "references"),
        spacing_mm,
        targets,
        tolerances,
        selection,
    )
    columns = columns_of(selection)
    header = ["case", "class", *columns]
    rows = class_rows(result["cases"], result["per_class"], columns)
    return ScoreTable(
        rows=[dict(zip(header, row, strict=True)) for row in rows],
        mean=result["mean"],
        per_class=result["per_class"],
    )


def _of_files(
    predictions: Path, references: Path, raters: Sequence[Path], consensus: str | None, **settings: Any
) -> ScoreTable:
    """Args: settings: of label maps, for `segmentation.evaluate`."""
    chosen = (settings["tolerance_mm"], settings["selection"]) != (_tolerances(1.0), MetricSelection())
    of_label_maps = ", lesion_iou, centreline and raters are for label maps of classes, not for "
    own = own_evaluation(predictions)
    is_table = references.suffix == ".csv"
    if (own or is_table) and (raters or consensus or chosen):
        raise ArgumentError("tolerance_mm", of_label_maps, str(predictions) if own else "a table")
    if own:
        return ScoreTable.of(own(predictions, references, workers=settings["workers"]))
    if is_table:
        return ScoreTable.of(of_table(predictions, references))
    evaluation = segmentation.evaluate(
        predictions, references, raters=raters, consensus=consensus, **settings
    )
    return ScoreTable.of(evaluation)


def _tolerances(tolerance_mm: float | Mapping[str, float]) -> dict[str | None, float]:
    """Millimetres by class; None stands for all other classes."""
    if isinstance(tolerance_mm, Mapping):
        return labels.tolerances([f"{name}={mm}" for name, mm in tolerance_mm.items()])
    return labels.tolerances([str(tolerance_mm)])
