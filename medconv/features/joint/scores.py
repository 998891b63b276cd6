"""Scores of label maps and of images' values, side by side; the label maps' rank checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from medconv.features.image_level.targets import TableScores
from medconv.metrics.dice import ClassScores
from medconv.targets.scores import DiceScores, NamedScore, Scores

Row = dict[str, Any]
_PREFIX = "value/"  # of scores of values


class JointScores(Scores):
    """A row of a checkpoint's `validation` has a list `dice`, of the classes, and `outputs` and `values`, as
    rows of whole images have them; `values` is None where they are not known.
    """

    title: ClassVar[str] = "Dice, and scores of the value"

    def __init__(self, names: Sequence[str], maps: DiceScores, values: TableScores) -> None:
        """Args: names: of the classes."""
        self.names = names
        self.maps = maps
        self.values = values

    def logged(self, rows: Mapping[str, Row], losses: Mapping[str, float | None]) -> dict[str, float | None]:
        of_values = self.values.logged(with_values(rows), {})
        return self.maps.logged(self._dice(rows), losses) | _prefixed(of_values)

    def summary(self, rows: Mapping[str, Row]) -> dict[str, Any]:
        return self.maps.summary(self._dice(rows)) | _prefixed(self.values.summary(with_values(rows)))

    def table(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        of_values = {f"val/{key.removeprefix('val/' + _PREFIX)}": value for key, value in summary.items()}
        return [*self.maps.table(summary), *self.values.table(of_values)]

    def case_scores(self, rows: Mapping[str, Row]) -> dict[str, float | None]:
        return self.maps.case_scores(self._dice(rows))

    def case_cells(self, row: Row) -> dict[str, Any]:
        of_values = self.values.case_cells(row) if row["values"] is not None else {}
        return self.maps.case_cells(self._by_class(row)) | of_values

    def case_entry(self, row: Row) -> dict[str, Any]:
        return {**row, "dice": self._by_class(row)}

    def over_folds(self, folds: Sequence[Mapping[str, Row]]) -> dict[str, Any]:
        """Those of label maps, and of values as `value`."""
        of_maps = self.maps.over_folds([self._dice(fold) for fold in folds])
        return {**of_maps, "value": self.values.over_folds([with_values(fold) for fold in folds])}

    def over_folds_lines(self, scores: Mapping[str, Any], cases: int) -> list[tuple[str, list[Any]]]:
        """Those of label maps, with the values' means beside them."""
        of_values = {
            "all cases, mean": scores["value"]["mean"],
            "mean of folds": scores["value"]["mean_of_folds"],
        }
        lines = []
        for title, cells in self.maps.over_folds_lines(scores, cases):
            further = of_values.get(title) or dict.fromkeys(scores["value"]["mean"])
            lines.append((title, [*cells, *further.values()]))
        return lines

    def columns(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        of_values = {
            key.removeprefix(_PREFIX): value for key, value in summary.items() if key.startswith(_PREFIX)
        }
        return [*self.maps.columns(summary), *self.values.columns(of_values)]

    def _dice(self, rows: Mapping[str, Row]) -> dict[str, ClassScores]:
        return {case: self._by_class(row) for case, row in rows.items()}

    def _by_class(self, row: Row) -> ClassScores:
        return dict(zip(self.names, row["dice"], strict=True))


def with_values(rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows of cases whose values are known."""
    return {case: row for case, row in rows.items() if row["values"] is not None}


def _prefixed(scores: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_PREFIX}{name}": value for name, value in scores.items()}
