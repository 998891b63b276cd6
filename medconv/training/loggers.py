"""What a run logs into its folder: `metrics.csv`, and for TensorBoard curves, texts and hyperparameters."""

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard.summary import hparams

from medconv import config as configs
from medconv.config import RunConfig
from medconv.config.values import to_yaml
from medconv.planning.planner import Plan
from medconv.planning.report import table
from medconv.targets.scores import metric_of_summary
from medconv.training.run_dir import RunDir
from medconv.utils.atomic_io import replacing

# Environment variable of a sweep's job: its own overrides, as JSON.
HPARAMS = "MEDCONV_HPARAMS"


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


class TensorBoard(TensorBoardLogger):
    """Lightning's logger without a curve of the epoch, which Lightning adds to all metrics."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        curves = {name: value for name, value in metrics.items() if name != "epoch"}
        if curves:
            super().log_metrics(curves, step)

    @rank_zero_only
    def log_text(self, tag: str, text: str) -> None:
        """Text as it is, in a font of fixed width."""
        # TensorBoard renders Markdown; indented lines are a block of code
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self.experiment.add_text(tag, indented, 0)

    @rank_zero_only
    def log_hparams_page(self, params: Mapping[str, Any], curve: str) -> None:
        """One row of the HPARAMS page: hyperparameters, and the last value of a curve that was logged.

        Lightning's `log_hyperparams` would write the metric once more, as a curve of one point.
        """
        writer = self.experiment._get_file_writer()
        # The value 0 is a placeholder: the page reads the value from the curve
        for summary in hparams(dict(params), {curve: 0.0}):
            writer.add_summary(summary)
        self.finalize("success")


def boards(trainer: Trainer) -> list[TensorBoardLogger]:
    """The trainer's loggers to which pictures can be written."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def log_start_texts(trainer: Trainer, config: RunConfig, plan: Plan) -> None:
    """The config, and the plan with its reasons, in TensorBoard's TEXT page."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoard):
            logger.log_text("config", to_yaml(config.plain()))
            if plan.rows:
                logger.log_text("plan", table(plan.rows))


def log_hyperparameters(trainer: Trainer, config: RunConfig, folder: RunDir) -> None:
    """TensorBoard's HPARAMS page: hyperparameters with the best score; other loggers: hyperparameters.

    A sweep's job logs only its own overrides, since the page shows only the first few in alphabetical order.
    """
    groups = ("data", "model", "conv", "optimizer", "scheduler", "perf", "seed")
    content = {group: node for group, node in config.plain().items() if group in groups}
    params = {key: _loggable(value) for key, value in configs.flatten(content).items()}
    overrides = json.loads(os.environ.get(HPARAMS) or "{}")
    overrides = {key: _number(value) for key, value in overrides.items()}
    monitored = metric_of_summary(folder.summary())
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoard):
            logger.log_hparams_page(overrides or params, monitored.best_name)
        else:
            logger.log_hyperparams(params)


def _loggable(value: Any) -> int | float | str:
    """Loggers take no lists and no null."""
    return value if isinstance(value, (int, float, str, bool)) else str(value)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
