"""medconv/training/callbacks/progress.py: lines every few seconds, and a bar without the version number."""

import re
from pathlib import Path

import lightning as L
import pytest
from helpers.clock import CLOCK, Ticks
from helpers.small_images import CLASSES, fit, task
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from medconv.training.callbacks.progress import ProgressBar, ProgressLines


def test_lines_are_logged_every_few_seconds_and_after_a_validation(caplog: pytest.LogCaptureFixture) -> None:
    """Each step takes 8 seconds and has 16 samples."""
    with caplog.at_level("INFO", logger="medconv"):
        fit(task(CLASSES), 5, Ticks(step=8.0), ProgressLines(every=20.0, clock=CLOCK))
    steps, validation = (record.message for record in caplog.records if record.name.startswith("medconv"))
    assert re.fullmatch(r"epoch 0, step 3: loss \d\.\d{4}, 2\.0 samples/s", steps)
    assert re.fullmatch(r"epoch 0, step 5: validation AUC [01]\.\d{4}", validation)


def test_the_bar_has_no_version_number(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=CSVLogger(tmp_path), enable_checkpointing=False)
    module = task(CLASSES)
    assert "v_num" in TQDMProgressBar().get_metrics(trainer, module)
    assert "v_num" not in ProgressBar().get_metrics(trainer, module)
