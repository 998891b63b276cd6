"""The output folder of image-level networks: `predictions.csv`, one row per case.

Rows are appended as cases are predicted, so that a stopped command can resume; at the end the table is
written again in the order of the cases.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Case
from medconv.data.io.manifest import TABLE
from medconv.features.image_level.forward import ImageLevelScores
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.inference.output import Claim, Entry, Output, OutputState
from medconv.inference.predictor import Predictor
from medconv.utils.atomic_io import write_text
from medconv.utils.csv_cells import csv_text, original

# All other columns are outputs.
CASE_COLUMNS = ("case", "predicted")


class OutputTable(Output):
    """Where image-level predictions go; a case is done once it has a row. One process at a time.

    Args:
        path: the folder.
        targets: what the outputs mean.
        settings: as in `Output`.
        about: as in `Output`.
    """

    result_name = "predictions"

    def __init__(
        self, path: Path, targets: ImageLevelTargets, settings: Mapping[str, Any], about: Mapping[str, Any]
    ) -> None:
        plain_targets = targets.plain()
        super().__init__(
            path, settings={**settings, "targets": plain_targets}, about={**about, "targets": plain_targets}
        )
        self.target = path / TABLE
        self._targets = targets
        # By case id.
        self._rows: dict[str, list[str]] = {}

    @contextmanager
    def open(self, cases: Sequence[Case], overwrite: bool = False) -> Iterator[None]:
        with super().open(cases, overwrite):
            yield
            self._write(cases)

    def claims(self, cases: Sequence[Case]) -> Iterator[Claim]:
        self.skipped = [case.id for case in cases if case.id in self._rows]
        for case in cases:
            if case.id not in self._rows:
                yield Claim(case, lambda: None)

    def write(self, predictor: Predictor, case: Case, scores: ImageLevelScores) -> None:
        outputs = predictor.answer(scores)
        for extra in predictor.extras:
            extra.write(self.path, predictor, case, scores, outputs)
        self.add(case, outputs)

    def add(self, case: Case, outputs: np.ndarray) -> None:
        """Append a row.

        Args:
            outputs: (names,), as `ImageLevelTargets.decode` gives them.
        Raises:
            OSError: the disk is full, or no permission.
        """
        # Eight digits are all that float32 has.
        numbers = [f"{value:.8g}" for value in outputs]
        row = [case.id, *self._targets.prediction_cells(outputs), *numbers]
        self._rows[case.id] = row
        with self.target.open("a", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(csv_text([row]))

    def _check(
        self, state: OutputState, cases: dict[str, Entry], overwrite: bool, replaced: Sequence[str]
    ) -> None:
        if state.busy:
            raise self._refusal("another process writes its predictions there")
        super()._check(state, cases, overwrite, replaced)

    def _see(self, images: Sequence[Path]) -> None:
        """A table is the same for all images."""

    def _existing(self, manifest: Mapping[str, Any]) -> list[str]:
        """The complete rows; a last line without an end was cut off when its process was killed."""
        text = self._read(has_manifest=bool(manifest))
        complete = text[: text.rfind("\n") + 1]
        header_and_rows = list(csv.reader(io.StringIO(complete)))
        case_ids = {_written(case_id): case_id for case_id in manifest.get("cases", {})}
        rows = [list(map(original, row)) for row in header_and_rows[1:] if row]
        self._rows = {case_ids.get(row[0], row[0]): row for row in rows}
        return list(self._rows)

    def _read(self, has_manifest: bool) -> str:
        try:
            return self.target.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            if has_manifest:
                raise self._refusal("holds label maps; take another folder") from error
            return ""
        except UnicodeDecodeError as error:
            raise self._refusal(f"{TABLE} there is not a text file; take another folder") from error

    def _clean(self, replaced: Sequence[str]) -> None:
        for case_id in replaced:
            self._rows.pop(case_id, None)
        self._write([])

    def _write(self, cases: Sequence[Case]) -> None:
        """Write the table: these cases first, in their order, then its other rows."""
        output_columns = [column_of(name) for name in self._targets.names]
        header = ["case", *self._targets.prediction_columns, *output_columns]
        predicted = [case.id for case in cases if case.id in self._rows]
        # Without repetitions.
        order = dict.fromkeys([*predicted, *self._rows])
        rows = [self._rows[case_id] for case_id in order]
        write_text(self.target, csv_text([header, *rows]))


def column_of(name: str) -> str:
    """The column of the output with this name."""
    return f"output/{name}" if name in CASE_COLUMNS else name


def _written(case_id: str) -> str:
    """As it stands in the table: names of files may be no text."""
    return case_id.encode("utf-8", "backslashreplace").decode()
