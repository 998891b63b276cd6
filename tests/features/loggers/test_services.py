"""Other services than TensorBoard: medconv/features/loggers/services.py with the real packages, on the
disk.
"""

import sys

import pytest
from helpers import tiny
from helpers.waiting import until

from medconv.config import ConfigError


def test_mlflow_holds_what_a_run_logged(dataset, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    summary = tiny.train(dataset, tmp_path / "run", "logger=mlflow", "tags=[a,b]")
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("medconv")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.metrics["val.dice"] == pytest.approx(summary["val/dice"])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "train.loss")] == [0, 1, 2, 3]
    assert run.data.metrics["val.dice.box"] == pytest.approx(summary["val/dice_per_class"]["box"])
    assert run.data.params["optimizer.weight_decay"] == "0.01"
    assert {"a": "true", "b": "true"}.items() <= run.data.tags.items()
    assert list((tmp_path / "run/tensorboard").glob("events*")) and (tmp_path / "run/metrics.csv").is_file()


def test_wandb_writes_offline_into_the_run_s_folder(dataset, tmp_path):
    wandb = pytest.importorskip("wandb")
    tiny.train(dataset, tmp_path / "run", "logger=wandb", "tags=[a,b]")
    assert wandb.run is not None and wandb.run.offline and (wandb.run.name, wandb.run.group) == ("run", "run")
    assert wandb.run.config["optimizer.weight_decay"] == 0.01 and wandb.run.tags == ("a", "b")
    wandb.finish()
    (written,) = (tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb")
    until(lambda: b"val/dice/box" in written.read_bytes())


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_named_with_its_extra(name, dataset, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # as Python has it where there is none
    with pytest.raises(
        ConfigError, match=f"logger={name} needs the package {name}: pip install 'medconv\\[{name}\\]'"
    ):
        tiny.train(dataset, tmp_path / "run", f"logger={name}")
