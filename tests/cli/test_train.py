"""`medconv train` and `python train.py`: help, printed configs and results."""

import re

from helpers import tiny

from medconv.cli import train
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.targets.label_map import LabelMapTargets
from medconv.training.run_dir import RunDir


def test_train_py_prints_the_same_as_medconv_train(tmp_path):
    arguments = ["--cfg", "job", "-p", "trainer", "trainer.max_steps=3"]
    script, command = (tiny.command(name, *arguments, cwd=tmp_path).stdout for name in ("train.py", "train"))
    assert script == command and "max_steps: 3" in script


def test_a_resolved_config_is_printed_without_interpolations(monkeypatch, capsys):
    assert tiny.call(monkeypatch, "train", "--cfg", "job", "--resolve", "trainer.max_steps=3") == 0
    printed = capsys.readouterr().out
    assert "${" not in printed and "max_steps: 3" in printed
    assert "channels: '(from the data: channels)'" in printed


def test_the_result_shows_scores_speed_and_files(tmp_path):
    folder = RunDir(tmp_path)
    dice = {
        "val/dice": 0.75,
        "val/dice_per_class": {"box": 0.5, "hole": None},
        "val/cases": {"a": {}, "b": {}},
        "targets": LabelMapTargets.of_classes(("background", "box", "hole")).plain(),
    }
    speed = {
        "steps": 4,
        "wall_seconds": 2.0,
        "fit_seconds": 1.5,
        "samples_per_second": 3.25,
        "data_wait_share": 0.125,
    }
    lines = train.result_table({**dice, **speed}, folder).splitlines()
    assert lines[1:5] == [
        "Dice over 2 validation cases, best checkpoint",
        "  box              0.5000",
        "  hole               -   ",
        "  mean foreground  0.7500",
    ]
    assert (
        "4 steps in 1.5 s with validations, in all 2.0 s with preparation; 3.2 samples/s, "
        "12.5 % of the time was spent waiting for data"
    ) in lines
    assert f"checkpoint  {folder.last}" in lines  # there is no best one
    targets = MulticlassTargets(("no", "yes")).plain()
    auc = {"targets": targets, "val/auc": 0.9, "val/accuracy": 0.8, "val/cases": {"a": {}}}
    text = train.result_table(auc, folder)
    assert "scores over 1 validation case," in text and re.search(r"\n  auc +0\.9000\n", text)
    assert "no validation" in train.result_table({"targets": targets}, folder)


def test_the_worst_cases_stand_below_the_mean(tmp_path):
    cases = {name: {"box": dice} for name, dice in zip("abcd", (0.9, 0.2, 0.8, 0.7), strict=True)}
    summary = {
        "val/dice": 0.65,
        "val/dice_per_class": {"box": 0.65},
        "val/cases": cases,
        "targets": LabelMapTargets.of_classes(("background", "box")).plain(),
    }
    lines = train.result_table(summary, RunDir(tmp_path)).splitlines()
    assert lines[3:5] == [
        "  mean foreground  0.6500",
        "  Dice over cases: sd 0.3109, worst b 0.2000, d 0.7000, c 0.8000",
    ]


def test_a_caution_stands_below_the_scores(tmp_path):
    targets = MulticlassTargets(("no", "yes")).plain()
    summary = {
        "targets": targets,
        "val/auc": 0.9,
        "val/cases": {"a": {}},
        "split_warning": "two of one patient",
    }
    lines = train.result_table(summary, RunDir(tmp_path)).splitlines()
    scores_end = next(number for number, line in enumerate(lines) if "auc" in line)
    assert "caution: two of one patient" in lines[scores_end + 1 : scores_end + 3]
