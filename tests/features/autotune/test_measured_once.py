"""medconv/features/autotune/measured_once.py: one measurement for all ranks and later runs; files that are no results."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from medconv.config import ConfigError, DataConfig, RunConfig, TrainerConfig
from medconv.features.autotune import measured_once
from medconv.utils.hardware import uses_gpu


def config(folder, devices=1):
    return replace(
        RunConfig(), data=DataConfig(cache_dir=str(folder)), trainer=TrainerConfig("cpu", devices, 1)
    )


def measured(config, seconds=2.0, **key):
    return measured_once.measured_once(
        config, "steps", key, lambda: {"seconds": seconds}, lambda result: "seconds" in result
    )


def test_later_runs_read_the_first_result_of_the_same_key(tmp_path):
    first, path = measured(config(tmp_path), 2.0, patch=8)
    assert path.parent == tmp_path / "steps" and json.loads(path.read_text()) == first
    assert measured(config(tmp_path), 3.0, patch=8)[0]["seconds"] == 2.0
    assert measured(config(tmp_path), 3.0, patch=16)[0]["seconds"] == 3.0


def test_a_result_that_holds_once_is_written_for_other_ranks_alone(tmp_path):
    def measured_busy(devices):
        return measured_once.measured_once(
            config(tmp_path, devices),
            "steps",
            {"devices": devices},
            lambda: {"seconds": 2.0},
            lambda result: "seconds" in result,
            holds=lambda result: False,
        )[1]

    assert not measured_busy(devices=1).exists()
    assert measured_busy(devices=2).is_file()


def test_steps_are_measured_with_the_flags_of_the_run(tmp_path):
    """And so a result with other flags is another one."""

    def flags():
        return (
            torch.backends.cudnn.benchmark,
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        )

    before = flags()
    plain = config(tmp_path)
    changed = replace(
        plain,
        trainer=replace(plain.trainer, benchmark=True, deterministic=True),
        perf=replace(plain.perf, matmul_precision="medium"),
    )
    with measured_once.measuring(changed):
        assert flags() == (True, True, "medium")
    assert flags() == before
    assert measured(plain, 2.0)[0]["seconds"] == 2.0
    assert measured(changed, 3.0)[0]["seconds"] == 3.0


def test_other_ranks_wait_for_the_result_of_rank_0(tmp_path, monkeypatch):
    _, path = measured(config(tmp_path))
    record = path.read_text()
    path.unlink()
    monkeypatch.setenv("RANK", "1")
    waits = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: path.write_text(record))
    monkeypatch.setattr(measured_once, "time", waits)
    assert measured(config(tmp_path, 2), 3.0)[0]["seconds"] == 2.0


def test_waiting_for_rank_0_ends_with_an_error(tmp_path, monkeypatch):
    seconds = iter([0.0, 1.0, measured_once._PATIENCE + 1.0])
    waits = SimpleNamespace(monotonic=seconds.__next__, sleep=lambda _: None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(measured_once, "time", waits)
    with pytest.raises(ConfigError, match=r"rank 0's measurement did not come to .*that all ranks share"):
        measured(config(tmp_path, 2))


@pytest.mark.parametrize("content", ["", '{"other": 1}', "[]", "{}", "1"])
def test_a_damaged_file_is_measured_anew(tmp_path, caplog, content):
    _, path = measured(config(tmp_path))
    path.write_text(content)
    assert measured(config(tmp_path), 3.0)[0]["seconds"] == 3.0
    assert f"{path} cannot be read, so it is measured again" in caplog.text
    assert json.loads(path.read_text())["seconds"] == 3.0


def test_several_ranks_need_a_file_that_can_be_written(tmp_path, caplog):
    (tmp_path / "steps").write_text("in the way")
    assert measured(config(tmp_path))[0]["seconds"] == 2.0
    assert "the result cannot be kept for later runs" in caplog.text
    with pytest.raises(ConfigError, match=r"cannot tell the other ranks: data\.cache_dir: "):
        measured(config(tmp_path, 2))


def test_the_key_has_this_machine(tmp_path):
    key = measured(config(tmp_path))[0]["key"]
    assert key["hardware"][0] and key["versions"] and not uses_gpu("cpu")
