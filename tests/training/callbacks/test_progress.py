"""medconv/training/callbacks/progress.py: lines, the bar, and curves of learning rates."""

from __future__ import annotations

import io
import logging
import re
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from helpers.clock import CLOCK, Ticks
from helpers.small_images import CLASSES, fit, task
from lightning import LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from medconv.training.callbacks.progress import LearningRate, ProgressBar, ProgressLines, _duration
from medconv.training.callbacks.time_budget import TimeBudget
from medconv.training.checkpoint.writer import AtomicCheckpointIO, CheckpointWriter
from medconv.training.growing_patch import GrowingPatch


def test_lines_are_logged_every_few_seconds_and_after_a_validation(caplog):
    """Each step takes 8 seconds and has 16 samples."""
    with caplog.at_level("INFO", logger="medconv"):
        fit(task(CLASSES), 5, Ticks(step=8.0), ProgressLines(every=20.0, clock=CLOCK))
    steps, validation = (record.message for record in caplog.records if record.name.startswith("medconv"))
    assert re.fullmatch(r"epoch 0, step 3 of 5, about 0:16 left: loss \d\.\d{4}, 2\.0 samples/s", steps)
    assert re.fullmatch(r"epoch 0, step 5: validation cross-entropy \d\.\d{4}", validation)


def test_lines_of_a_budget_say_how_many_steps_and_how_much_time_are_left(caplog):
    budget = TimeBudget(100.0, clock=CLOCK)
    lines = ProgressLines(budget, every=20.0, clock=CLOCK)
    with caplog.at_level("INFO", logger="medconv"):
        fit(task(CLASSES), 18, Ticks(step=8.0), budget, lines)
    assert [line.partition(": loss")[0] for line in caplog.messages if "left" in line][2:] == [
        "epoch 0, step 9 of about 12, 0:28 left",
        "epoch 0, step 12 of about 12, 0:04 left",
    ]


def test_where_steps_end_a_run_before_its_time_they_say_what_is_left(caplog):
    budget = TimeBudget(100.0, clock=CLOCK)
    lines = ProgressLines(budget, every=20.0, clock=CLOCK)
    with caplog.at_level("INFO", logger="medconv"):
        fit(task(CLASSES), 8, Ticks(step=8.0), budget, lines)
    assert [line.partition(": loss")[0] for line in caplog.messages if "left" in line] == [
        "epoch 0, step 3 of 8, about 0:40 left",
        "epoch 0, step 6 of 8, about 0:16 left",
    ]


@pytest.mark.parametrize(
    ("step", "text"), [(10, "step 10 of 100, about 2:42 left"), (90, "step 90 of 100, about 0:31 left")]
)
def test_the_time_left_counts_the_growth_of_patches(step, text):
    """Ten steps on half of each edge take 10 seconds, the other 90 of the run some 160 seconds."""
    lines = ProgressLines(clock=CLOCK)
    trainer = SimpleNamespace(global_step=0, estimated_stepping_batches=100)
    module = SimpleNamespace(growing_patch=GrowingPatch((1, 1)))
    lines.on_train_start(trainer, module)
    CLOCK.advance(10.0 if step == 10 else 200.0)
    trainer.global_step = step
    assert lines._how_far(trainer, module, {"image": torch.zeros(1, 1, 100, 100)}) == text


def test_a_resumed_run_says_at_which_step(caplog, tmp_path):
    with caplog.at_level("INFO", logger="medconv"):
        lines = ProgressLines(level=logging.DEBUG, clock=CLOCK)
        trainer = fit(task(CLASSES), 3, lines)
        assert "resumed" not in caplog.text
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        fit(task(CLASSES), 5, lines, ckpt_path=tmp_path / "last.ckpt")
    assert "resumed at step 3" in caplog.messages


def test_lines_can_be_for_the_log_alone(caplog):
    with caplog.at_level("DEBUG", logger="medconv"):
        fit(task(CLASSES), 3, Ticks(step=8.0), ProgressLines(every=20.0, level=logging.DEBUG, clock=CLOCK))
    levels = [r.levelname for r in caplog.records if r.name.endswith("callbacks.progress")]
    assert levels == ["DEBUG", "INFO"]  # a step, and the validation


def drawn(tmp_path, steps, *more, **settings):
    """All states of the bar of a training of 8 seconds a step, and 1 for each of 4 batches of validation."""
    console = Console(file=io.StringIO(), force_terminal=True, width=90, color_system=None)
    writer = CheckpointWriter(tmp_path / "run/checkpoints", AtomicCheckpointIO(), every=1e9)
    bar = ProgressBar(writer, clock=CLOCK, console=console, **settings)
    fit(task(CLASSES), steps, Ticks(step=8.0, case=1.0), writer, *more, bar)
    assert bar._bar is None
    return re.findall(r"(?:epoch|validating|starting)[^\r\n]*", console.file.getvalue())


def test_the_bar_shows_steps_time_left_loss_and_best_score(tmp_path):
    lines = drawn(tmp_path, 5)
    steps = [line for line in lines if line.startswith("epoch")]
    assert re.fullmatch(r"epoch 0 \S+ +3/5 0:16 left  loss \d\.\d{3} *", steps[2])
    assert re.fullmatch(
        r"epoch 0 \S+ 5/5 0:00 left  loss \d\.\d{3}  best cross-entropy \d\.\d{3} *", steps[-1]
    )
    assert [line.split()[1] for line in lines if line.startswith("validating")] == [
        "1/4",
        "2/4",
        "3/4",
        "4/4",
    ]


def test_the_bar_is_drawn_now_and_then_and_follows_the_budget_of_time(tmp_path):
    lines = drawn(tmp_path, 8, every=20.0)
    numbers = [int(line.split("/8 ")[0][-1]) for line in lines if line.startswith("epoch")]
    assert numbers == [1, 4, 7, 8, 8]  # the last one as it ends
    budget = TimeBudget(1000.0, clock=CLOCK)
    budget.expected_steps = 6
    assert " 1/6 " in next(line for line in drawn(tmp_path, 8, budget=budget) if line.startswith("epoch"))


def test_an_error_ends_the_bar(tmp_path):
    class Fails(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ValueError("in a step")

    writer = CheckpointWriter(tmp_path / "checkpoints", AtomicCheckpointIO(), every=1e9)
    bar = ProgressBar(writer, console=Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(ValueError, match="in a step"):
        fit(task(CLASSES), 2, bar, Fails())
    assert bar._bar is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (75.9, "1:15"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_durations(seconds, text):
    assert _duration(seconds) == text


class Module(LightningModule):
    """Two groups with the same learning rate and one with a tenth of it; a schedule that halves them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(3))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return torch.stack([part(batch) for part in self.parts]).sum()

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(part.parameters()), "lr": lr}
            for part, lr in zip(self.parts, (1.0, 1.0, 0.1), strict=True)
        ]
        optimizer = torch.optim.SGD(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_each_base_learning_rate_has_a_curve():
    rates = []

    class Seen(LearningRate):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            rates.append({k: float(v) for k, v in trainer.logged_metrics.items()})

    trainer = Trainer(
        accelerator="cpu",
        max_steps=4,
        log_every_n_steps=2,
        logger=False,
        callbacks=[Seen()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=1))
    assert set(rates[-1]) == {"train/lr", "train/lr_2"}
    assert rates[1] == pytest.approx({"train/lr": 0.5, "train/lr_2": 0.05})
    assert rates[3] == pytest.approx({"train/lr": 0.125, "train/lr_2": 0.0125})
