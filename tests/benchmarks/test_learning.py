"""scripts/benchmarks/learning.py: trainings are compared case by case."""

import argparse
import csv
import json
from statistics import fmean
from xml.etree import ElementTree

import pytest
import torch
from helpers import tiny
from helpers.benchmarks_harness import benchmark, commands_in_this_process, learning_arguments
from torch import nn

from benchmarks import learning
from benchmarks.tap_rates import tap_rates
from medconv.data.datasets import dataset_json
from medconv.data.splits import grouped


def test_trainings_are_compared_case_by_case(monkeypatch, tmp_path):
    commands_in_this_process(monkeypatch)
    dataset = tiny.write_dataset(tmp_path / "data", cases=10)
    arguments = learning_arguments(dataset, tmp_path / "runs", ["plain", "ball"], seeds=2)
    arguments += ["--plot", str(tmp_path / "gains.svg"), "--per-case", str(tmp_path / "cases.csv")]
    rows = benchmark(monkeypatch, tmp_path, *arguments)
    assert [row["variant"] for row in rows] == ["plain", "ball"]
    splits = json.loads((tmp_path / "runs/data/splits-3.json").read_text())
    assert len(splits) == 2 and len(splits[0]["train"]) == 3 and len(splits[0]["val"]) == 2
    summaries = {
        v: json.loads(next((tmp_path / "runs/data").glob(f"3-2-*/{v}/0/summary.json")).read_text())
        for v in ("plain", "ball")
    }
    texts = [text.text for text in ElementTree.parse(tmp_path / "gains.svg").iter() if text.text]
    assert {"ball, 2 seeds", "data: 3 cases, 2 steps"} <= {*texts}
    assert not any(text.startswith("plain") for text in texts)
    assert rows[1]["dice_of_seeds"][0] == pytest.approx(summaries["ball"]["val/dice"], abs=0.02)
    assert rows[1]["low"] <= rows[1]["difference"] <= rows[1]["high"]
    with (tmp_path / "cases.csv").open(newline="") as file:
        cases = [line for line in csv.DictReader(file) if (line["variant"], line["seed"]) == ("ball", "1")]
    assert fmean(float(line["dice"]) for line in cases) == pytest.approx(
        rows[1]["dice_of_seeds"][1], abs=2e-4
    )
    assert rows[0]["difference"] == 0 and rows[1]["million_weights"] < rows[0]["million_weights"]


def test_trainings_on_data_that_are_read_otherwise_have_other_folders(tmp_path):
    """Else those of a leaky split would count for a split by patients."""

    def folders(*arguments):
        parser = argparse.ArgumentParser()
        learning.add_arguments(parser)
        options = parser.parse_args(["--root", "ACDC", *arguments])
        return learning._folder(tmp_path, "10", options), learning._splits(tmp_path, "10", options)

    assert folders() == (tmp_path / "10-300", tmp_path / "splits-10.json")
    all_folders = [folders(), folders("--group-pattern", r"p\d+"), folders("--data", "data=msd", "data.x=1")]
    assert len({folder for folder, _ in all_folders}) == len({splits for _, splits in all_folders}) == 3


def test_cases_of_a_patient_stay_together(tmp_path):
    dataset = tiny.write_dataset(tmp_path / "data", cases=10)
    cases = grouped(dataset_json.auto(dataset).cases, r"case_(?=[02468]$)|\w+")
    learning._write_splits(cases, "all", 2, tmp_path / "splits-all.json")
    splits = json.loads((tmp_path / "splits-all.json").read_text())
    held_out = {case for split in splits for case in split["val"]}
    assert len(splits) == 2 and held_out
    even = {f"case_{number}" for number in range(0, 10, 2)}
    assert even <= held_out or not even & held_out


def test_paired_differences_are_over_the_seeds_of_both():
    plain = {0: {"a": 0.5, "b": 0.6}, 1: {"a": 0.5, "b": 0.7}}
    other = {0: {"a": 0.6, "b": 0.7}, 2: {"a": 0.0, "b": 0.0}}
    assert learning.paired(other, plain) == (None, None, pytest.approx(0.1))  # one seed has no interval
    low, high, mean = learning.paired({**other, 1: {"a": 0.7, "b": 0.9}}, plain)
    assert (low, mean, high) == (pytest.approx(0.15 - 12.706 * 0.05, abs=1e-3), pytest.approx(0.15), pytest.approx(0.15 + 12.706 * 0.05, abs=1e-3))  # fmt: skip
    _, corrected, _ = learning.paired({**other, 1: {"a": 0.7, "b": 0.9}}, plain, comparisons=5)
    assert corrected == pytest.approx(0.15 + 63.657 * 0.05, abs=1e-3)
    assert learning.paired({5: {"a": 1.0}}, plain) == (None, None, None)


def test_taps_have_their_own_rates_and_the_same_weights():
    conv = nn.Conv2d(2, 3, 3)
    before = conv.weight.detach().clone()
    swapped = tap_rates(conv)
    torch.testing.assert_close(swapped.weight.detach(), before)
    swapped.weight.sum().backward()
    (original,) = swapped.parametrizations.weight.parameters()
    rates = original.grad[0, :, 0].reshape(3, 3)  # (out, taps, in)
    assert rates[1, 1] > rates[0, 1] > rates[0, 0] > 0
    assert float(rates.square().mean()) == pytest.approx(1)
