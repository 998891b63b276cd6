"""medconv/training/run.py: a run from its config, which is checked first, to its summary and test scores."""

import csv
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import ranks, small_runs, tiny
from helpers.picture_tables import checked
from lightning import Callback

from medconv.config import ConfigError
from medconv.inference.load import load
from medconv.targets.label_map import LabelMapTargets
from medconv.training import run
from medconv.training.run import with_loss
from medconv.utils import checkpoint_io, signals
from medconv.utils.exit_codes import DONE
from medconv.utils.signals import RunInterrupted


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


@pytest.mark.parametrize("has_gpu", [False, True])
def test_training_on_a_cpu_keeps_freed_memory(has_gpu, dataset, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(run, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    layout = ["data.layout._target_=tests.training.test_run.layout_that_stops", "+data.layout.agreed=false"]
    with pytest.raises(signals.RunInterrupted):
        tiny.train(dataset, tmp_path / "run", *layout, "trainer.accelerator=auto", "schedule.patch=whole")
    assert kept == ([] if has_gpu else [True])


def test_pretrained_weights_of_another_fold_are_named(dataset, tmp_path, caplog):
    tiny.train(dataset, tmp_path / "first", "data.fold=0")
    weights = f"init.pretrained={tmp_path}/first/checkpoints/last.ckpt"
    tiny.train(dataset, tmp_path / "same", "data.fold=0", weights)
    assert "trained on cases that are validated now" not in caplog.text
    tiny.train(dataset, tmp_path / "other", "data.fold=1", weights)
    assert f"{weights}: trained on cases that are validated now" in caplog.text


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


def test_sharded_weights_are_whole_while_test_cases_are_scored(table, tmp_path):
    """Two processes have two cases and one: each forward pass of one alone would wait for the other."""
    settings = ["trainer.strategy=fsdp", "trainer.devices=2", "test=true", "data.batch_size=1"]
    arguments = small_runs.overrides(table, *SETTINGS, *settings)
    ended = ranks.run(*arguments, f"run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert set(ended.codes) == {DONE}, "".join(ended.stderr)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert sorted(summary["test/cases"]) == ["15", "16", "17"]


@pytest.mark.parametrize("mean", ["weight_averaging.begin=300", "weight_averaging.begin=0"])
def test_a_finished_run_is_tested_as_a_new_one_is(mean, table, tmp_path, monkeypatch):
    """With the weights of the best checkpoint, which are not the last ones, as `medconv predict` uses them; from
    step 0 on they are a mean, which training itself does not go on with.
    """
    at_once = small_runs.train(table, tmp_path / "at_once", *SETTINGS, mean, "test=true")
    best, last = (
        checkpoint_io.read(tmp_path / f"at_once/checkpoints/{name}.ckpt") for name in ("best", "last")
    )
    assert last["global_step"] == 9 and (best["global_step"] < 9 or mean.endswith("=0"))
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

    first = small_runs.train(table, tmp_path / "later", *SETTINGS, mean)
    assert not any(key.startswith("test/") for key in first)
    later = small_runs.train(table, tmp_path / "later", *SETTINGS, mean, "test=true")
    assert later["test/cases"] == at_once["test/cases"] and later["wall_seconds"] == first["wall_seconds"]
    assert small_runs.train(table, tmp_path / "later", *SETTINGS, mean, "test=true") == later


class StoppedAtTheEnd(Callback):
    """Asks to stop when training has ended."""

    def on_train_end(self, trainer, pl_module):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_is_stopped_as_its_training_ends_is_tested_later(table, tmp_path):
    """Test loaders end early then; the cases of validation are none of the test."""
    stops = f"+callbacks.stops._target_={__name__}.StoppedAtTheEnd"
    with pytest.raises(RunInterrupted):
        small_runs.train(table, tmp_path / "run", *SETTINGS, stops, "test=true")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "done" and not any(key.startswith("test/") for key in summary)
    later = small_runs.train(table, tmp_path / "run", *SETTINGS, stops, "test=true")
    assert sorted(later["test/cases"]) == ["15", "16", "17"]


def test_no_test_case_writes_no_scores(table, tmp_path, caplog):
    summary = small_runs.train(
        table, tmp_path / "run", *SETTINGS, "test=true", "trainer.limit_test_batches=0"
    )
    assert not any(key.startswith("test/") for key in summary)
    assert "trainer.limit_test_batches=0 left no test case" in caplog.text


def test_a_dataset_without_test_cases_is_an_error_before_training(tmp_path):
    folder = small_runs.write_classes(tmp_path / "classes", 4)
    with pytest.raises(ConfigError, match=r"^test=true: classes names no test cases.*medconv evaluate"):
        small_runs.train(folder, tmp_path / "run", *small_runs.OURS, "test=true")
    assert not (tmp_path / "run").exists()


def test_an_open_loss_is_that_of_the_targets_with_the_keys_of_the_user():
    targets = LabelMapTargets.of_classes(["background", "a"])
    config = with_loss(checked(Path("labels.csv")), targets)
    assert config.loss["_target_"].endswith("DiceCrossEntropy")
    chosen = checked(Path("labels.csv"), "loss=tversky")
    assert with_loss(chosen, targets).loss == chosen.loss
