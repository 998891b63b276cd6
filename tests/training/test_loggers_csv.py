"""medconv/training/loggers.py: metrics.csv, over new columns and restarts."""

import csv

from lightning.pytorch.utilities import rank_zero_only

from medconv.training.loggers import CsvLogger


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_one_row_per_call_with_its_step(tmp_path):
    logger = CsvLogger(tmp_path / "metrics.csv")
    logger.log_metrics({"loss": 0.5}, step=10)
    logger.log_metrics({"loss": 0.25}, 20)
    logger.log_metrics({"loss": 0.125})
    assert logger.path.read_text().splitlines() == ["step,loss", "10,0.5", "20,0.25", ",0.125"]


def test_a_new_column_keeps_the_rows_before_it(tmp_path):
    logger = CsvLogger(tmp_path / "metrics.csv")
    logger.log_metrics({"loss": 0.5, "lr": 1e-3}, 1)
    logger.log_metrics({"val/dice": 0.75, "val/dice/liver, left": 0.5}, 1)
    logger.log_metrics({"lr": 1e-4, "loss": 0.25}, 2)
    empty = {"step": "", "loss": "", "lr": "", "val/dice": "", "val/dice/liver, left": ""}
    assert rows(logger.path) == [
        {**empty, "step": "1", "loss": "0.5", "lr": "0.001"},
        {**empty, "step": "1", "val/dice": "0.75", "val/dice/liver, left": "0.5"},
        {**empty, "step": "2", "loss": "0.25", "lr": "0.0001"},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_restart_keeps_rows_and_columns(tmp_path):
    path = tmp_path / "metrics.csv"
    CsvLogger(path).log_metrics({"loss": 0.5, "lr": 0.1}, 1)
    again = CsvLogger(path)
    again.log_metrics({"lr": 0.2}, 2)
    again.log_metrics({"dice": 1.0}, 3)
    assert rows(path) == [
        {"step": "1", "loss": "0.5", "lr": "0.1", "dice": ""},
        {"step": "2", "loss": "", "lr": "0.2", "dice": ""},
        {"step": "3", "loss": "", "lr": "", "dice": "1.0"},
    ]


def test_an_empty_file_is_a_fresh_start(tmp_path):
    path = tmp_path / "metrics.csv"
    path.touch()
    CsvLogger(path).log_metrics({"loss": 1.0}, 0)
    assert rows(path) == [{"step": "0", "loss": "1.0"}]


def test_nothing_is_written_before_the_first_value_or_by_other_ranks(tmp_path, monkeypatch):
    logger = CsvLogger(tmp_path / "metrics.csv")
    logger.log_hyperparams({"lr": 1})
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger.log_metrics({"loss": 1.0}, 0)
    assert not list(tmp_path.iterdir())


def test_what_lightning_asks_of_a_logger(tmp_path):
    logger = CsvLogger(tmp_path / "metrics.csv")
    assert (logger.name, logger.version, logger.experiment) == ("csv", "", logger.path)


def test_a_line_that_a_kill_cut_is_dropped(tmp_path):
    path = tmp_path / "metrics.csv"
    CsvLogger(path).log_metrics({"loss": 1.0}, step=0)
    with path.open("a") as file:
        file.write("1,0.")
    CsvLogger(path).log_metrics({"loss": 3.0}, step=2)
    assert path.read_text().split() == ["step,loss", "0,1.0", "2,3.0"]
