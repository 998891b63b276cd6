"""medconv/training/run.py: a run from its composed config to its summary."""

import os
import signal

import pytest
import torch
from helpers import tiny

from medconv.config import ConfigError
from medconv.inference.load import load
from medconv.utils import signals
from medconv.utils.exit_codes import DONE


def test_config_that_failed_does_not_block_its_folder(dataset, tmp_path):
    with pytest.raises(ConfigError):
        tiny.train(dataset, tmp_path / "run", "model.norm=nonsense")
    assert tiny.train(dataset, tmp_path / "run")["status"] == "done"


def test_training_on_all_cases_has_no_best_checkpoint_and_no_warning(dataset, tmp_path, caplog, recwarn):
    summary = tiny.train(dataset, tmp_path / "run", "data.fold=all")
    assert "is zero" not in caplog.text + "".join(str(warning.message) for warning in recwarn)
    assert summary["val/dice"] is None
    assert summary["val/dice_per_class"] is None
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()
    assert not (tmp_path / "run/checkpoints/best.ckpt").exists()
    assert load(tmp_path / "run/checkpoints/last.ckpt").class_names == ("background", "box", "hole")


@pytest.mark.parametrize(
    ("overrides", "expands"),
    [
        ([], True),
        (["schedule.patch=whole"], False),
        (["perf.compile=true"], False),
        (["trainer.accelerator=cpu"], False),
    ],
)
def test_gpu_memory_can_be_used_again_while_patches_grow(dataset, tmp_path, monkeypatch, overrides, expands):
    """Before the data is prepared, and so before anything is measured on the GPU."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that it is as before after the test
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    layout = ["data.layout._target_=tests.training.test_run.layout_that_stops", "+data.layout.agreed=false"]
    with pytest.raises(signals.RunInterrupted):
        tiny.train(dataset, tmp_path / "run", *layout, "trainer.accelerator=auto", *overrides)
    assert ("PYTORCH_ALLOC_CONF" in os.environ) == expands


def layout_that_stops(agreed, **_):
    raise signals.RunInterrupted(signal.SIGTERM, agreed)


@pytest.mark.parametrize("agreed", [True, False])
def test_process_that_lightning_started_exits_with_0_if_all_processes_stop(
    dataset, tmp_path, monkeypatch, agreed
):
    """Lightning kills the first process if another one exits with an error, and the first may still be
    writing. A process that stops alone must exit with an error, so that the first one ends too.
    """
    monkeypatch.setenv("LOCAL_RANK", "1")
    layout = [
        "data.layout._target_=tests.training.test_run.layout_that_stops",
        f"+data.layout.agreed={agreed}",
    ]
    with pytest.raises(SystemExit) as caught:
        tiny.train(dataset, tmp_path / "run", *layout)
    assert isinstance(caught.value, signals.RunInterrupted) != agreed
    assert agreed == (caught.value.code == DONE)
