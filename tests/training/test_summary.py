"""medconv/training/summary.py: the keys, the scores of a checkpoint, and the status of a run."""

import signal

import pytest

from medconv.targets.label_map import LabelMapTargets
from medconv.training import summary
from medconv.utils.cluster import PeerLostError
from medconv.utils.signals import RunInterrupted


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RunInterrupted(signal.SIGTERM), "preempted"),
        (PeerLostError("rank 1"), "preempted"),
        (RunInterrupted(signal.SIGINT), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
        (ValueError("no data"), "failed"),
    ],
)
def test_the_status_says_how_the_run_ended(error, status):
    assert summary.status_after(error) == status


def test_dice_is_the_mean_over_classes_of_the_means_over_cases():
    rows = {"a": {"box": 1.0, "hole": 0.5}, "b": {"box": 0.5, "hole": None}}
    scores = summary.best_scores(
        {"targets": LabelMapTargets.of_classes(["rest", "box", "hole"]).plain(), "validation": rows}
    )
    assert scores == {"val/dice": 0.625, "val/dice_per_class": {"box": 0.75, "hole": 0.5}, "val/cases": rows}


def test_image_level_scores_are_measured_on_all_cases_together():
    rows = {
        str(number): {"outputs": [0.0, logit], "values": [float(number % 2)]}
        for number, logit in enumerate((-1.0, 2.0, 1.0, 3.0))
    }
    record = {"targets": {"kind": "multiclass", "names": ["bright", "dark"]}, "validation": rows}
    scores = summary.best_scores(record)
    assert scores["val/accuracy"] == 0.75 and scores["val/auc"] == 1.0 and scores["val/cases"] == rows
    assert summary.best_scores({**record, "validation": {}}) == {"val/cases": {}}


def test_an_empty_summary_is_valid_and_has_every_key():
    empty = dict.fromkeys(summary.KEYS)
    assert {"status", "val/dice", "command"} <= set(empty)
    assert summary.is_valid(empty)


def test_rows_of_cases_may_be_nested_but_hold_numbers_alone():
    row = {"apex": {"error_mm": 1.5, "is_there": True, "heights": [0.5, None]}}
    assert summary.is_valid({"val/cases": {"a": row}})
    assert not summary.is_valid({"val/cases": {"a": {"apex": {"error_mm": "1.5"}}}})
