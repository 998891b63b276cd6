"""`metrics.csv`: every logged value of a run, one row per step."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from medconv.utils.atomic_io import replacing


class CsvLogger(Logger):
    """Rows are appended as they come and kept over restarts; a new column rewrites the file once.

    Lightning's own logger of this kind deletes the file when a run is continued.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.columns: list[str] | None = (
            None  # read with the first row: until then the file may be moved away
        )

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> Path:
        return self.path

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The hyperparameters are in `config.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.columns is None:
            self.columns = self._known_columns()
        row = {"step": step, **metrics}
        new = [name for name in row if name not in self.columns]
        if new:
            self._add_columns(new)
        try:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self.columns).writerow(row)
        except OSError as error:
            error.filename = str(self.path)  # a full disk's has none
            raise

    def _known_columns(self) -> list[str]:
        """Of the rows from before a restart; a line that a kill cut is dropped, or the next row would be
        glued to it.
        """
        if not self.path.is_file():
            return []
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self.path.write_bytes(content[:whole])
        with self.path.open(newline="") as file:
            return next(csv.reader(file), [])

    def _add_columns(self, names: list[str]) -> None:
        rows: list[dict[str, str]] = []
        if self.path.is_file():
            with self.path.open(newline="") as file:
                rows = list(csv.DictReader(file))
        self.columns = [*(self.columns or []), *names]
        with replacing(self.path) as partial, partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)
