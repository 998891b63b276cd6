"""`metrics.csv`: every logged value of a run, one row per step."""

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from medconv.utils.atomic_io import replacing


class CsvLogger(Logger):
    """Appends a row per step, and keeps earlier rows when a run resumes; a new column rewrites the file once.

    Lightning's CSVLogger deletes the file when a run resumes.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        # Read at the first row; until then the file may be moved
        self.columns: list[str] | None = None

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
            self.columns = self._existing_columns()
        row = {"step": step, **metrics}
        new_columns = [name for name in row if name not in self.columns]
        if new_columns:
            self._add_columns(new_columns)
        try:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self.columns).writerow(row)
        except OSError as error:
            # The error of a full disk names no file
            error.filename = str(self.path)
            raise

    def _existing_columns(self) -> list[str]:
        """Columns of the file of a resumed run. An incomplete last line, left by a kill, is removed."""
        if not self.path.is_file():
            return []
        content = self.path.read_bytes()
        complete_bytes = content.rfind(b"\n") + 1
        if complete_bytes < len(content):
            self.path.write_bytes(content[:complete_bytes])
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
