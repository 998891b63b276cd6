"""The output folder of image-level networks: `predictions.csv`, one row per case.

Rows are appended as cases are predicted, so that a stopped command can resume; at the end the table is
written again in the order of the cases.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Case
from medconv.inference.forward import ImageLevelForward, ImageLevelScores
from medconv.inference.manifest import Entry, OutputState
from medconv.inference.output import Claim, Output
from medconv.inference.predictor import Predictor
from medconv.metrics.visualization import png
from medconv.targets.image_level import ImageLevelTargets
from medconv.utils.atomic_io import replacing, write_text

TABLE = "predictions.csv"
SALIENCY = "saliency"
CASE_COLUMNS = ("case", "predicted")  # all other columns are outputs


class OutputTable(Output):
    """Where image-level predictions go; a case is done once it has a row. One process at a time.

    Args: settings, about: as in `Output`. saliency: whether Grad-CAM pictures are written, too.
    """

    what = "predictions"

    def __init__(
        self,
        path: Path,
        targets: ImageLevelTargets,
        settings: Mapping[str, Any],
        about: Mapping[str, Any],
        saliency: bool = False,
    ) -> None:
        named = {"targets": targets.plain()}
        super().__init__(path, {**settings, "saliency": saliency, **named}, {**about, **named})
        self._targets, self._writes_saliency = targets, saliency
        self._rows: dict[str, list[str]] = {}

    @property
    def place(self) -> Path:
        return self.path / TABLE

    def saliency(self, case: str) -> Path:
        return self.path / SALIENCY / f"{case}.png"

    @contextmanager
    def open(self, cases: Sequence[Case], overwrite: bool = False) -> Iterator[None]:
        with super().open(cases, overwrite):
            yield
            self._write(cases)

    def claims(self, cases: Sequence[Case]) -> Iterator[Claim]:
        self.skipped = [case.id for case in cases if case.id in self._rows]
        yield from ((case, lambda: None) for case in cases if case.id not in self._rows)

    def write(self, predictor: Predictor, case: Case, scores: ImageLevelScores) -> None:
        if self._writes_saliency:
            assert isinstance(predictor.forward, ImageLevelForward)
            picture = png(predictor.forward.overlay(scores))
            self.saliency(case.id).parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.saliency(case.id)) as partial:
                partial.write_bytes(picture)
        self.add(case, predictor.answer(scores))

    def add(self, case: Case, outputs: np.ndarray) -> None:
        """Append a row. Raises: OSError: the disk is full, or no permission."""
        cells = self._targets.prediction_cells(outputs)
        self._rows[case.id] = row = [case.id, *cells, *(f"{value:.8g}" for value in outputs)]
        with self.place.open("a", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(_text([row]))

    def _check(
        self, state: OutputState, cases: dict[str, Entry], overwrite: bool, replaced: Sequence[str]
    ) -> None:
        if state.busy:
            raise self._refusal("another process writes its predictions there")
        super()._check(state, cases, overwrite, replaced)

    def _existing(self, manifest: Mapping[str, Any]) -> list[str]:
        """The complete rows; a last line without an end was cut off when its process was killed."""
        try:
            text = self.place.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            if manifest:
                raise self._refusal("holds label maps; take another folder") from error
            text = ""
        except UnicodeDecodeError as error:
            raise self._refusal(f"{TABLE} there is not a text file; take another folder") from error
        rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
        cases = {_written(case): case for case in manifest.get("cases", {})}
        self._rows = {cases.get(row[0], row[0]): row for row in rows[1:] if row}
        return list(self._rows)

    def _clean(self, replaced: Sequence[str]) -> None:
        for case in replaced:
            self._rows.pop(case, None)
        self._write([])

    def _write(self, cases: Sequence[Case]) -> None:
        """Write the table: these cases first, in their order, then its other rows."""
        header = ["case", *self._targets.prediction_columns, *map(column_of, self._targets.names)]
        order = dict.fromkeys([*(case.id for case in cases if case.id in self._rows), *self._rows])
        write_text(self.place, _text([header, *(self._rows[case] for case in order)]))


def column_of(name: str) -> str:
    """The column of the output with this name."""
    return f"output/{name}" if name in CASE_COLUMNS else name


def _written(case: str) -> str:
    """As it stands in the table: names of files may be no text."""
    return case.encode("utf-8", "backslashreplace").decode()


def _text(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
