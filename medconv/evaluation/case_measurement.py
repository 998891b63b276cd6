"""The metrics of each case of a folder of predicted label maps."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Grid, Relabel
from medconv.data.datasets.patterns import home
from medconv.data.io.grids import on_grid, rounding_doubts
from medconv.data.io.images import read_label
from medconv.data.io.manifest import MANIFEST, read_manifest
from medconv.data.per_case import check_source_spacing, source_spacing
from medconv.evaluation import labels
from medconv.evaluation.raters import Raters, checked, numbered_of, rater_dice
from medconv.evaluation.segmentation_results import CaseRow
from medconv.metrics.segmentation import MetricSelection, measure
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import explained
from medconv.utils.progress import each

log = logging.getLogger(__name__)


def stated_spacing(predictions: Path) -> Any:
    """The value of `data.source_spacing_mm` for the images of these predictions; None: not set.

    Raises:
        ValueError: the manifest's value is not a spacing.
    """
    stated = read_manifest(predictions).get("settings", {}).get("source_spacing_mm")
    if stated is not None:
        with explained(f"{predictions / MANIFEST}"):
            check_source_spacing(stated)
    return stated


def agreed_spacing(predictions: Sequence[Path], cases: Collection[str]) -> list[Any]:
    """`stated_spacing` of folders of predictions of the same cases; a folder that states nothing takes that
    of another.

    Raises:
        ValueError: two differ for a case.
    """
    stated = [stated_spacing(folder) for folder in predictions]
    first_stated = next((spacing for spacing in stated if spacing is not None), None)
    if first_stated is None:
        return stated
    agreed = [first_stated if spacing is None else spacing for spacing in stated]
    for case in sorted(cases):
        spacings = [source_spacing(spacing, case) for spacing in agreed]
        # the same spacing may be written in several ways
        if any(spacing != spacings[0] for spacing in spacings):
            raise ValueError(
                f"case {case}: by data.source_spacing_mm in {MANIFEST} its spacing is {spacings[0]} mm in "
                f"{predictions[0]}, {spacings[-1]} in {predictions[-1]}; the same reference cannot have both"
            )
    return agreed


@dataclass(frozen=True)
class LabelMaps:
    """Predictions of one network, or references.

    Args:
        path: folder, or pattern with `{id}`.
        files: case to label map.
        relabel: how the file of each case is read, see `label_values.relabels`.
    """

    path: Path
    files: Mapping[str, Path]
    relabel: Mapping[str, Relabel | None] = field(default_factory=dict)

    def read(self, case: str, like: Path | None = None) -> tuple[np.ndarray, Grid]:
        """A label map and its grid. Raises: ValueError: as `read_label`, or a value that is not declared."""
        return read_label(self.files[case], like, self.relabel.get(case))

    @property
    def folder(self) -> Path:
        return home(self.path)


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        tolerances: of the surface Dice in mm, by class; None stands for all other classes.
        annotated: such as `siteA_*=liver`: other classes are undefined in these cases.
    """

    tolerances: Mapping[str | None, float]
    selection: MetricSelection
    annotated: Sequence[str]
    raters: Raters


@dataclass(frozen=True)
class CaseMeasurement:
    """Measures cases of one set of predictions.

    Args:
        targets: None: the label values of each case are its classes.
        stated_spacing: what `data.source_spacing_mm` stated of the images.
    """

    predictions: LabelMaps
    references: LabelMaps
    targets: SegmentationTargets | None
    settings: Settings
    stated_spacing: Any

    def row(self, case: str) -> CaseRow:
        """Metric to class to value. Raises: ValueError: the case cannot be measured."""
        prediction_file = self.predictions.files[case]
        reference_file = self.references.files[case]
        prediction, prediction_grid = self.predictions.read(case)
        reference, grid = self.references.read(case, prediction_file)
        prediction = on_grid(prediction, reference_file, grid, prediction_file, prediction_grid)
        for doubt in rounding_doubts(reference_file, grid, prediction_file, prediction_grid):
            log.warning("case %s: %s", case, doubt)
        references = {str(self.references.path): (reference_file, reference)}
        references |= self.settings.raters.label_maps(case, prediction_file, reference_file, grid)
        targets = self.targets or numbered_of([prediction, *(label for _, label in references.values())])
        labels.check_declared(prediction_file, prediction, targets)
        label_maps = checked(references, targets)
        reference = self.settings.raters.reference(list(label_maps.values()), targets.ignore)
        scores = measure(
            prediction,
            reference,
            grid.with_spacing_mm(source_spacing(self.stated_spacing, case)),
            targets,
            tolerance_mm=labels.tolerance_of(self.settings.tolerances, targets.names),
            selection=self.settings.selection,
        )
        if len(label_maps) > 1:
            scores |= rater_dice(prediction, label_maps, targets)
        return {"case": case, **scores}


def measure_cases(cases: Collection[str], row: Callable[[str], CaseRow], workers: int) -> list[CaseRow]:
    """A row per case. Raises: ValueError: all cases that cannot be measured."""

    def row_or_error(case: str) -> CaseRow | str:
        try:
            return row(case)
        except ValueError as error:
            return f"  case {case}: {error}"

    # collect the errors of all cases, so that a user can mend all files at once
    results = list(each(row_or_error, list(cases), workers, "evaluating"))
    errors = [result for result in results if isinstance(result, str)]
    if errors:
        raise ValueError(f"{len(errors)} of {len(cases)} cases cannot be evaluated\n" + "\n".join(errors))
    return [result for result in results if not isinstance(result, str)]
