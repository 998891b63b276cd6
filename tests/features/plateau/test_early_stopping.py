"""medconv/features/plateau/early_stopping.py: runs that stop early, and learning rates that are lowered."""

import csv
import json
import math
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from helpers import ranks, tiny
from helpers.stopped import stopped
from lightning import Callback

from medconv.config import ConfigError
from medconv.utils import checkpoint_io
from medconv.utils.exit_codes import DONE
from medconv.utils.signals import RunInterrupted

# No validation but the first is counted as progress.
NEVER = ["early_stopping=patience", "early_stopping.patience=2", "early_stopping.min_delta=2", "logger=none"]
PLATEAU = ["scheduler=plateau", "scheduler.patience=1", "scheduler.min_delta=2", "scheduler.warmup_steps=0"]


def test_a_run_without_progress_stops_early_and_records_why(dataset, tmp_path):
    summary = tiny.train(dataset, tmp_path / "run", *NEVER, *PLATEAU, "trainer.max_steps=40")
    assert summary["status"] == "done" and summary["steps"] == 12  # validations after 4, 8 and 12 steps
    best = next(iter(validations(tmp_path / "run")))
    assert summary["stopped_early"] == {
        "step": 12,
        "reason": f"val/dice was not better than {best:.4f} in the last 2 validations",
    }
    assert len(validations(tmp_path / "run")) == 3
    content = checkpoint_io.read(tmp_path / "run/checkpoints/last.ckpt")
    assert content["callbacks"]["EarlyStopping{'monitor': 'val/dice', 'mode': 'max'}"]["wait_count"] == 2
    assert content["lr_schedulers"][0]["level"] == 0.25  # lowered twice, the last validation included
    assert content["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.25 * 0.02)
    again = tiny.train(dataset, tmp_path / "run", *NEVER, *PLATEAU, "trainer.max_steps=40")
    assert again == summary  # it has finished


def test_a_resumed_run_keeps_its_count(dataset, tmp_path):
    """Two steps between validations, in the middle of an epoch."""
    often = [*NEVER, "trainer.val_check_interval=2", "trainer.limit_val_batches=1", "trainer.max_steps=40"]
    stop = stopped(tmp_path / "sent", number=signal.SIGTERM, step=4)
    with pytest.raises(RunInterrupted):
        tiny.train(dataset, tmp_path / "run", *often, stop)
    assert len(validations(tmp_path / "run")) == 2
    summary = tiny.train(dataset, tmp_path / "run", *often, stop)
    assert summary["steps"] == summary["stopped_early"]["step"] == 6
    # another run counts its own validations, by a patience that is spent, too
    last = tmp_path / "run/checkpoints/last.ckpt"
    more = tiny.train(dataset, tmp_path / "more", *often, f"run.resume={last}")
    assert more["steps"] == more["stopped_early"]["step"] == 12


class Scores(Callback):
    """Validations with these values of `val/score`, one after another, then the last again."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = list(values)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            pl_module.log("val/score", self.values.pop(0) if len(self.values) > 1 else self.values[0])


SCORED = [
    *(
        "early_stopping=patience",
        "early_stopping.patience=2",
        "early_stopping.monitor=val/score",
        "logger=none",
    ),
    "+callbacks.scores._target_=tests.features.plateau.test_early_stopping.Scores",
]


def test_no_run_stops_before_min_steps(dataset, tmp_path):
    """After two validations without progress one is better, so the run continues."""
    settings = [
        "trainer.min_steps=14",
        "+callbacks.scores.values=[0.5,0.4,0.4,0.6,0.7,0.6,0.6]",
        "trainer.max_steps=60",
    ]
    summary = tiny.train(dataset, tmp_path / "run", *SCORED, *settings)
    assert summary["steps"] == summary["stopped_early"]["step"] == 28  # the seventh validation
    assert len(validations(tmp_path / "run")) == 7


def test_a_run_that_ends_anyway_has_not_stopped_early(dataset, tmp_path):
    for name, end in (("steps", "trainer.max_steps=12"), ("epochs", "trainer.max_epochs=3")):
        settings = ["trainer.max_steps=-1", end, "+callbacks.scores.values=[0.5,0.4,0.4]"]
        summary = tiny.train(dataset, tmp_path / name, *SCORED, *settings)
        assert (summary["steps"], summary["stopped_early"]) == (12, None)


def test_a_run_that_was_killed_while_stopping_has_ended(dataset, tmp_path):
    folder = tmp_path / "run"
    settings = [*SCORED, "+callbacks.scores.values=[0.5,0.4,0.4]", "trainer.max_steps=60"]
    first = tiny.train(dataset, folder, *settings)
    assert first["steps"] == 12
    kept = {key: value for key, value in first.items() if key not in ("status", "stopped_early")}
    (folder / "summary.json").write_text(json.dumps({**kept, "status": "running"}))
    again = tiny.train(dataset, folder, *settings)
    assert (again["status"], again["steps"], again["stopped_early"]) == ("done", 12, first["stopped_early"])
    assert len(validations(folder)) == 3


def test_two_processes_end_at_the_same_step(dataset, tmp_path):
    """By a metric that only rank 0 has."""
    alone = [
        "early_stopping.monitor=val/cross_entropy",
        "early_stopping.mode=min",
        "scheduler.monitor=val/cross_entropy",
    ]
    arguments = [*NEVER, *PLATEAU, *alone, "scheduler.mode=min", "trainer.max_steps=40"]
    two = ["trainer.devices=2", "trainer.strategy=ddp", f"run.dir={tmp_path / 'run'}"]
    ended = ranks.run(*tiny.overrides(dataset, *arguments, *two), cwd=tmp_path)
    assert ended.codes == [DONE, DONE], ended.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["hardware"]["devices"] == 2
    assert summary["steps"] == summary["stopped_early"]["step"] == 6
    assert ended.stdout[0].count("stopped early") == 2  # in the log, and in the table at the end
    assert ended.stdout[0].count("learning rate lowered") == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            ["early_stopping=patience", "early_stopping.monitor=val/f1"],
            "EarlyStopping: monitor=val/f1: no such metric; there are ",
        ),
        (
            ["scheduler=plateau", "scheduler.monitor=val/f1"],
            "PlateauSchedule: monitor=val/f1: no such metric; there are ",
        ),
        (
            ["early_stopping=patience", "data.fold=all"],
            "early_stopping=patience needs validations, but there are no cases to",
        ),
        (
            ["scheduler=plateau", "data.fold=all"],
            "scheduler=plateau needs validations, but there are no cases to",
        ),
        (
            ["early_stopping=patience", "trainer.limit_val_batches=0"],
            "early_stopping=patience needs validations, but there are no",
        ),
        (
            ["early_stopping=patience", "early_stopping.patience=0"],
            "early_stopping: patience must be a whole number of validations, 1",
        ),
    ],
)
def test_settings_without_effect_are_errors(override, message, dataset, tmp_path):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        tiny.train(dataset, tmp_path / "run", *override, "logger=none")
    assert isinstance(error.value, ConfigError) or "no such metric" in message


def validations(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    scores = [float(row["val/dice"]) for row in rows if row.get("val/dice")]
    assert not any(math.isnan(value) for value in scores)
    return scores
