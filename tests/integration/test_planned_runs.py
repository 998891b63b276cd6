"""What is planned reaches a run's config, log and folder, and stays there on another machine."""

import logging

import pytest
import torch
import yaml
from helpers import tiny

from medconv.config import ConfigError
from medconv.planning.limits import EarlierPlan
from medconv.training.run_dir import RunDir

PLANNED = ["data.batch_size=null", "trainer.max_steps=2", "data.samples_per_epoch=4"]


@pytest.fixture
def done(dataset, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="medconv")
    tiny.train(dataset, tmp_path / "run", *PLANNED)
    assert "budget: the most medconv uses on a CPU (" in " ".join(caplog.text.split())
    return tmp_path / "run"


def test_a_plan_stays_with_its_run(done, dataset, caplog):
    """The memory that was measured is recorded, so that a machine with another amount neither refuses nor
    replans.
    """
    values = yaml.safe_load((done / "config.yaml").read_text())
    known = values["derived"]
    assert (
        values["data"]["batch_size"] == 2
        and values["plan"]["memory_gb"] is None
        and known["memory_gb"] >= 0.5
    )
    assert (
        known["patch_size"] == [16, 20, 12]
        and known["normalisation"] == ["zscore"]
        and known["slice_axis"] is None
    )
    assert known["strides"] == [[2, 2, 1], [2, 2, 2]] and known["stage_strides"] == [
        [1, 1, 1],
        *known["strides"],
    ]

    known["memory_gb"] = 0.75  # which no machine is measured to have
    (done / "config.yaml").write_text(yaml.safe_dump(values))
    caplog.clear()
    assert tiny.train(dataset, done, *PLANNED)["status"] == "done"
    log = " ".join(caplog.text.split())
    assert "budget: as when this run began" in log and "this run is finished" in log
    with pytest.raises(ConfigError, match=r"plan\.memory_gb: null there, 3\.0 now"):
        tiny.train(dataset, done, *PLANNED, "plan.memory_gb=3")


def test_a_run_that_begins_from_a_checkpoint_takes_its_memory(done, tmp_path):
    path = tmp_path / "other.ckpt"
    content = torch.load(done / "checkpoints/last.ckpt", weights_only=True)
    content["medconv"]["config"]["derived"]["memory_gb"] = 0.75
    torch.save(content, path)
    assert RunDir(tmp_path / "new", str(path)).earlier_plan() == EarlierPlan(
        "as when this run began", memory_gb=0.75, size="large", normalisation=("zscore",)
    )
    assert RunDir(tmp_path / "new").earlier_plan() is RunDir(done, "never").earlier_plan() is None
