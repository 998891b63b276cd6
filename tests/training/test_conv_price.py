"""medconv/training/conv_price.py: a dear convolution is named at the start of a run, a plain one costs nothing."""

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import tiny

from medconv.training import conv_price, run
from medconv.training.run_dir import RunDir

DEAR = """
from torch import nn


class Twenty(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x):
        return sum(self.conv(x) for _ in range(20)) / 20


def twenty_times(conv):
    return Twenty(conv)


def broken(conv):
    raise RuntimeError("no such layer")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "dear_layer_of_a_test.py").write_text(DEAR)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "dear_layer_of_a_test"
    sys.modules.pop("dear_layer_of_a_test", None)


def test_a_run_says_what_its_layers_cost_and_measures_it_once(
    own: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = tiny.write_dataset(tmp_path / "data")
    caplog.set_level(logging.INFO)
    conv = [f"conv._target_={own}.twenty_times", "conv=none"]
    summary = tiny.train(dataset, tmp_path / "run", *conv)
    assert summary["conv_price"]["ratio"] > 2
    assert summary["conv_price"]["layer"].startswith(("encoder", "decoder"))
    assert "times nn.Conv's time, forward and backward; " in caplog.text
    (kept,) = (tmp_path / "prepared" / "conv_price").glob("*.json")
    known = json.loads(kept.read_text())
    kept.write_text(json.dumps({**known, "ratio": 7.5}))
    again = tiny.train(dataset, tmp_path / "again", *conv)
    assert again["conv_price"]["ratio"] == 7.5


@pytest.mark.parametrize("conv", ["none", "smooth"])
def test_plain_layers_are_not_measured(conv: str, tmp_path: Path) -> None:
    dataset = tiny.write_dataset(tmp_path / "data")
    summary = tiny.train(dataset, tmp_path / "run", f"conv={conv}")
    assert summary["conv_price"] is None
    assert not (tmp_path / "prepared" / "conv_price").exists()


def test_a_kernel_that_is_computed_in_place_is_measured(tmp_path: Path) -> None:
    """`install` changes the class of the layer that it gets, which is then no `nn.Conv` either."""
    dataset = tiny.write_dataset(tmp_path / "data")
    summary = tiny.train(dataset, tmp_path / "run", "conv=basis")
    assert summary["conv_price"]["ratio"] > 0


def test_a_measurement_that_fails_is_a_warning(
    own: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = tiny.write_dataset(tmp_path / "data")
    folder = RunDir(tmp_path / "run")
    checked = tiny.checked(dataset)
    config, prepared = run.prepare(checked, folder)
    resolved = run.resolve(config, prepared, folder)
    broken = replace(resolved, conv={"_target_": f"{own}.broken", "_partial_": True})
    assert conv_price.price(broken) is None
    assert "conv: cannot be timed beside nn.Conv: no such layer" in caplog.text
