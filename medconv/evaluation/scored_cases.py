"""Evaluations in which each case has some scores, as those of images and of objects."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from medconv.data.case import Grid
from medconv.data.datasets.common import read_json
from medconv.data.datasets.patterns import files_of, home
from medconv.data.io.grids import on_grid, rounding_doubts
from medconv.data.io.manifest import MANIFEST
from medconv.evaluation import labels
from medconv.evaluation.case_measurement import measure_cases
from medconv.evaluation.results import plain_number
from medconv.evaluation.segmentation_results import CaseRow
from medconv.metrics.statistics import describe, paired

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredCases:
    """The result of an evaluation of folders; a subclass says how a case is read and scored.

    Args:
        words: of each score.
        counts: further columns of a row.
        result: the content of the JSON file: `mean` (as `means`), `statistics` (score to what `describe`
            returns), `cases` (a row each), `targets`, `train_cases`, `without_prediction`; with `compare`
            also `compare` (the same for the other predictions) and `comparison` (score to what `paired`
            returns).
        files: case to its reference, its prediction and, with `compare`, its other prediction.
        images: case to image, for cases that have one.
    """

    counted: ClassVar[str] = "references"
    words: ClassVar[Mapping[str, str]]
    counts: ClassVar[Sequence[str]] = ()
    result: dict[str, Any]
    files: Mapping[str, tuple[Path, ...]]
    images: Mapping[str, Path]

    @staticmethod
    def find(path: Path, argument: str) -> dict[str, Path]:
        """Case id to its prediction or reference. Raises: ValueError: as `files_of`."""
        return files_of(path, argument)

    @staticmethod
    def read(path: Path, like: Path | None = None) -> tuple[np.ndarray, Grid]:
        """A prediction or reference, (X, Y, Z), and its grid.

        Args: like: a file on whose grid contours are filled.
        Raises: ValueError: it is none.
        """
        raise NotImplementedError

    @staticmethod
    def measure(prediction: np.ndarray, reference: np.ndarray) -> CaseRow:
        """The row of a case. Shape: (X, Y, Z) twice."""
        raise NotImplementedError

    @staticmethod
    def means(rows: Sequence[CaseRow]) -> dict[str, Any]:
        """The mean of each score, and what else sums rows up."""
        raise NotImplementedError

    @classmethod
    def of_folders(
        cls,
        predictions: Path,
        references: Path,
        compare: Path | None = None,
        workers: int = 1,
        images: Path | None = None,
    ) -> Self:
        """Measure every prediction against the reference of the same case id, as `Family.evaluate`.

        Args:
            predictions, references, compare: folders, or patterns with `{id}`.
            workers: cases measured at once.
            images: their folder, for the report; None: see `labels.images_of`.
        Raises:
            ValueError: predictions without a reference, or that cannot be measured; names all.
        """
        sets = {predictions: cls.find(predictions, "predictions")}
        if compare:
            sets[compare] = cls.find(compare, "compare")
        reference_files = labels.reference_files(references, list(sets.values()), cls.find)
        first = sets[predictions]
        # as `own_evaluation` has read them: the manifest may be that of another program
        manifest = home(predictions) / MANIFEST
        targets = read_json(manifest).get("targets") if manifest.is_file() else None
        image_files = labels.images_of(home(predictions), home(references), images, list(first))
        summaries = []
        for path, files in sets.items():
            pairs = {case: (files[case], reference_files[case]) for case in files}
            summaries.append(cls._summary(path, pairs, targets, workers))
        result = {
            **summaries[0],
            "references": str(references),
            "targets": targets,
            "per_class": {},
            "without_prediction": sorted(set(reference_files) - set(first)),
        }
        if compare:
            result["compare"] = summaries[-1]
            result["comparison"] = cls._comparison(summaries[0], summaries[-1])
        all_sets = (reference_files, *sets.values())
        files_of_cases = {case: tuple(files[case] for files in all_sets if case in files) for case in first}
        return cls(result, files_of_cases, image_files)

    @classmethod
    def row(cls, case: str, prediction_file: Path, reference_file: Path, targets: Any) -> CaseRow:
        """What there is to say of a case. Args: targets: as plain values, from the manifest.

        Raises: ValueError: as `pair`.
        """
        prediction, reference, _, doubts = cls.pair(prediction_file, reference_file)
        for doubt in doubts:
            log.warning("case %s: %s", case, doubt)
        return cls.measure(prediction, reference)

    @classmethod
    def _summary(
        cls, path: Path, files: Mapping[str, tuple[Path, Path]], targets: Any, workers: int
    ) -> dict[str, Any]:
        def row(case: str) -> CaseRow:
            return {"case": case, **cls.row(case, *files[case], targets)}

        rows = measure_cases(list(files), row, workers)
        return {
            "predictions": str(path),
            "mean": cls.means(rows),
            "statistics": {name: describe([row[name] for row in rows]) for name in cls.words},
            "cases": rows,
            "train_cases": labels.train_cases(home(path), list(files)),
        }

    @classmethod
    def pair(
        cls, prediction_file: Path, reference_file: Path
    ) -> tuple[np.ndarray, np.ndarray, Grid, list[str]]:
        """A prediction on the grid of its reference, the reference, that grid, and doubts about both grids.

        Raises: ValueError: other grids, or as `read`.
        """
        prediction, prediction_grid = cls.read(prediction_file)
        reference, grid = cls.read(reference_file, prediction_file)
        prediction = on_grid(prediction, reference_file, grid, prediction_file, prediction_grid)
        doubts = rounding_doubts(reference_file, grid, prediction_file, prediction_grid)
        return prediction, reference, grid, doubts

    @classmethod
    def _comparison(cls, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
        """The paired test of each score, over the cases that both sets have."""
        others = {row["case"]: row for row in second["cases"]}
        pairs = [(row, others[row["case"]]) for row in first["cases"] if row["case"] in others]
        return {name: paired([a[name] for a, _ in pairs], [b[name] for _, b in pairs]) for name in cls.words}

    def cells(self, row: CaseRow) -> dict[str, Any]:
        """Column to cell of the table of cases."""
        return {column: row[column] for column in (*self.counts, *self.words)}

    def csv_rows(self) -> Iterator[Sequence[Any]]:
        """The header, then a row per case (with `compare`, of both sets)."""
        yield ["predictions", "case", *self.cells(self.result["cases"][0])]
        summaries = [self.result, self.result["compare"]] if "compare" in self.result else [self.result]
        for summary in summaries:
            for row in summary["cases"]:
                yield [summary["predictions"], row["case"], *self.cells(row).values()]

    def score_lines(self) -> list[str]:
        """Each score with its interval."""
        lines = [f"{len(self.result['cases'])} cases"]
        for name, words in self.words.items():
            ends = self.result["statistics"][name]
            interval = f"[{plain_number(ends['low'])}, {plain_number(ends['high'])}]"
            lines.append(f"{words:<26}{plain_number(self.result['mean'][name]):>10}  {interval}")
        return lines

    def comparison_lines(self) -> list[str]:
        lines = []
        for name, test in self.result["comparison"].items():
            lines.append(
                f"{self.words[name]}, minus compare: {plain_number(test['difference'])} in {test['n']} "
                f"cases, p {plain_number(test['p'])} (Wilcoxon)"
            )
        return lines
