"""medconv/training/run.py: test cases are scored once, with the best checkpoint, and only if there are any."""

import csv

import pytest
from helpers import small_runs, tiny

from medconv.config import ConfigError
from medconv.utils import checkpoint_io

# steps so long that an earlier validation than the last is the best
SETTINGS = [
    *small_runs.OURS,
    "optimizer=adamw",
    "optimizer.lr=0.5",
    "scheduler=constant",
    "scheduler.warmup_steps=0",
    "data.target_type=regression",
    "trainer.max_steps=9",
    "seed=1",
    "logger=none",
]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """12 cases to train on, 3 to validate and 3 to test."""
    path = small_runs.write_table(tmp_path_factory.mktemp("parts") / "table", {"label": "number"})
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "split"])
        writer.writeheader()
        for number, row in enumerate(rows):
            writer.writerow(
                {**row, "split": ["train", "val", "test"][max(0, number - 9) // 3 if number > 11 else 0]}
            )
    return path


def test_a_finished_run_is_tested_as_a_new_one_is(table, tmp_path, monkeypatch):
    """With the weights of the best checkpoint, which are not the last ones, as `medconv predict` uses them."""
    at_once = small_runs.train(table, tmp_path / "at_once", *SETTINGS, "test=true")
    best, last = (
        checkpoint_io.read(tmp_path / f"at_once/checkpoints/{name}.ckpt") for name in ("best", "last")
    )
    assert best["global_step"] < last["global_step"] == 9
    assert sorted(at_once["test/cases"]) == ["15", "16", "17"]
    assert not set(at_once["test/cases"]) & set(at_once["val/cases"])
    errors = [abs(row["outputs"][0] - row["values"][0]) for row in at_once["test/cases"].values()]
    assert at_once["test/mae"] == pytest.approx(sum(errors) / 3)
    networks = ["--checkpoint", tmp_path / "at_once/checkpoints/best.ckpt", "--device", "cpu"]
    assert tiny.call(monkeypatch, "predict", *networks, "--input", table, "--output", tmp_path / "out") == 0
    with (tmp_path / "out/predictions.csv").open(newline="") as file:
        predicted = {row["case"]: float(row["label"]) for row in csv.DictReader(file)}
    outputs = {case: row["outputs"][0] for case, row in at_once["test/cases"].items()}
    assert outputs == pytest.approx({case: predicted[case] for case in outputs}, rel=1e-5)

    first = small_runs.train(table, tmp_path / "later", *SETTINGS)
    assert not any(key.startswith("test/") for key in first)
    later = small_runs.train(table, tmp_path / "later", *SETTINGS, "test=true")
    assert later["test/cases"] == at_once["test/cases"] and later["wall_seconds"] == first["wall_seconds"]
    assert small_runs.train(table, tmp_path / "later", *SETTINGS, "test=true") == later


def test_a_dataset_without_test_cases_is_an_error_before_training(tmp_path):
    folder = small_runs.write_classes(tmp_path / "classes", 4)
    with pytest.raises(ConfigError, match=r"^test=true: classes names no test cases.*medconv evaluate"):
        small_runs.train(folder, tmp_path / "run", *small_runs.OURS, "test=true")
    assert not (tmp_path / "run").exists()
