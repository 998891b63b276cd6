"""`logger=tensorboard`: curves, pictures, the config as text, and the page of hyperparameters."""

from collections.abc import Mapping
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard.summary import hparams


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
