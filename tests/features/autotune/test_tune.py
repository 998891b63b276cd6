"""medconv/features/autotune/tune.py: perf=autotune in real runs; choices are cached and shared with other ranks."""

import json
import shutil

import pytest
import torch
from helpers import ranks, tiny
from omegaconf import OmegaConf

from medconv import doors
from medconv.config import ConfigError, RunConfig, TrainerConfig, flatten
from medconv.config.schema import TUNED
from medconv.features.autotune import tune
from medconv.training.run_dir import RunDir
from medconv.utils.exit_codes import DONE

UNSETTLED = tune._with(RunConfig(), dict.fromkeys(TUNED))
AUTO = ("perf=autotune", "perf.auto_seconds=0.1", "model.norm=instance", "trainer.precision=null")


@pytest.fixture(scope="module")
def after_a_run(tmp_path_factory):
    """A folder with the dataset `data/tiny` and `run`, whose choice is cached in `data/prepared`."""
    folder = tmp_path_factory.mktemp("measured")
    tiny.train(tiny.write_dataset(folder / "data/tiny"), folder / "run", *AUTO)
    return folder


@pytest.fixture
def dataset(tmp_path):
    return tiny.write_dataset(tmp_path / "data" / "tiny")


@pytest.fixture
def measured(after_a_run, tmp_path):
    """The dataset in a copy of `after_a_run` in the test's folder."""
    shutil.copytree(after_a_run, tmp_path, dirs_exist_ok=True)
    return tmp_path / "data/tiny"


def choice(folder):
    values = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    return {key: flatten(values)[key] for key in TUNED}


def cache_file(dataset):
    (path,) = (dataset.parent / "prepared/autotune").glob("*.json")
    return path


def test_a_run_measures_and_logs_its_choice(dataset, tmp_path, caplog):
    with caplog.at_level("INFO", logger="medconv"):
        tiny.train(dataset, tmp_path / "run", *AUTO)
    assert "perf=autotune takes the first of these" in caplog.text
    chosen = choice(tmp_path / "run")
    assert None not in chosen.values()
    # memory is ample, the run is short
    assert chosen["perf.activation_checkpointing"] == "none" and chosen["perf.compile"] is False
    record = json.loads(cache_file(dataset).read_text())
    assert record["choice"] == chosen
    first, *others = record["rows"]
    assert first["choice"].items() >= {key.split(".")[1]: value for key, value in chosen.items()}.items()
    assert all(first["seconds"] <= row["seconds"] / 0.97 for row in others if row["seconds"])


def test_the_cached_choice_is_for_the_same_network_only(measured, tmp_path, caplog):
    record = json.loads(cache_file(measured).read_text())
    record["choice"]["perf.channels_last"] = not record["choice"]["perf.channels_last"]
    cache_file(measured).write_text(json.dumps(record))
    with caplog.at_level("INFO", logger="medconv"):
        tiny.train(measured, tmp_path / "second", *AUTO, "seed=5")
    assert "perf=autotune: " in caplog.text and "takes the first" not in caplog.text
    assert choice(tmp_path / "second") == record["choice"]
    tiny.train(measured, tmp_path / "third", *AUTO, "model.channels=[4,6]")
    assert len(list((measured.parent / "prepared/autotune").glob("*.json"))) == 2


def test_a_resumed_run_keeps_its_choice(after_a_run, measured, tmp_path):
    chosen = choice(tmp_path / "run")
    cache_file(measured).write_text(json.dumps({"choice": dict.fromkeys(chosen, "another")}))
    original, copied_cache = after_a_run / "data/tiny", f"data.cache_dir={measured.parent / 'prepared'}"
    assert tiny.train(original, tmp_path / "run", *AUTO, copied_cache)["status"] == "done"
    assert choice(tmp_path / "run") == chosen


def test_settings_of_the_user_are_not_measured(dataset, tmp_path):
    fixed = ["perf.channels_last=false", "perf.activation_checkpointing=blocks", "trainer.precision=32-true"]
    tiny.train(dataset, tmp_path / "run", *AUTO, *fixed)
    assert choice(tmp_path / "run") == {
        "perf.channels_last": False,
        "perf.fast_norm": False,
        "perf.activation_checkpointing": "blocks",
        "perf.compile": False,
        "trainer.precision": "32-true",
    }


def test_measuring_does_not_change_the_training(dataset, tmp_path):
    fixed = ["perf.channels_last=true", "trainer.precision=32-true"]
    tiny.train(dataset, tmp_path / "auto", *AUTO, *fixed)
    tiny.train(dataset, tmp_path / "plain", "model.norm=instance", *fixed)
    assert tiny.losses(tmp_path / "auto") == pytest.approx(tiny.losses(tmp_path / "plain"), rel=1e-4)


def test_planned_seconds_follow_what_ends_the_run():
    assert tune._planned_seconds(TrainerConfig(max_epochs=100), 500, 2.0) == 100_000
    trainer = TrainerConfig(max_epochs=-1, max_steps=100, accumulate_grad_batches=8)
    assert tune._planned_seconds(trainer, 500, 2.0) == 1600
    assert tune._planned_seconds(TrainerConfig(), 10, 0.01) == pytest.approx(10)  # 100 epochs by default
    timed = TrainerConfig(max_epochs=-1, max_time="00:00:01:00")
    assert tune._planned_seconds(timed, 500, 2.0) == 60


def test_the_batch_is_chosen_where_all_else_is_set(dataset, tmp_path):
    fixed = [f"perf.{key}=false" for key in ("channels_last", "fast_norm", "compile")]
    fixed += ["perf.activation_checkpointing=none", "trainer.precision=32-true", "perf.auto_batch_size=true"]
    tiny.train(dataset, tmp_path / "run", *AUTO, *fixed)
    (file,) = (dataset.parent / "prepared/autotune").glob("*.json")
    chosen = json.loads(file.read_text())["choice"]["data.batch_size"]
    assert OmegaConf.load(tmp_path / "run/config.yaml").data.batch_size == chosen


def test_deep_supervision_heads_are_measured_too(dataset, tmp_path, monkeypatch):
    works, make_work = [], tune._work
    monkeypatch.setattr(tune, "_work", lambda *arguments: works.append(make_work(*arguments)) or works[-1])
    deep = ["model.channels=[4,6,8,8]", "model.strides=[2,2,2]", "data.patch_size=[16,16,16]"]
    tiny.train(dataset, tmp_path / "run", *AUTO, *deep, "task.deep_supervision=true", "trainer.max_steps=1")
    assert [tuple(o.shape[2:]) for o in works[0].network(works[0].image)] == [(16,) * 3, (8,) * 3]


def test_two_processes_measure_once(dataset, tmp_path):
    arguments = tiny.overrides(dataset, *AUTO, "trainer.devices=2", f"run.dir={tmp_path / 'run'}")
    ended = ranks.run(*arguments, cwd=tmp_path)
    assert ended.codes == [DONE, DONE], ended.stderr
    assert "".join(ended.stdout).count("perf=autotune takes the first of these") == 1
    assert torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 4


def test_the_error_if_nothing_fits_shows_the_table(dataset, tmp_path):
    settings = [*AUTO, "loss._target_=helpers.tiny.FullLoss"]
    with pytest.raises(ConfigError, match=r"no candidate runs, fits into memory.*\n.*takes the first"):
        tiny.train(dataset, tmp_path / "run", *settings)
    assert not (tmp_path / "run").exists()


def test_a_damaged_cache_is_measured_anew(measured, tmp_path, caplog):
    cache_file(measured).write_text("")
    assert tiny.train(measured, tmp_path / "second", *AUTO)["status"] == "done"
    assert "cannot be read, so it is measured again" in caplog.text
    assert set(json.loads(cache_file(measured).read_text())["choice"]) == set(TUNED)


def test_a_choice_that_cannot_be_cached_is_a_warning(dataset, tmp_path, caplog):
    tiny.train(dataset, tmp_path / "plain")
    (dataset.parent / "prepared/autotune").write_text("in the way")
    assert tiny.train(dataset, tmp_path / "run", *AUTO)["status"] == "done"
    assert "the result cannot be kept for later runs" in caplog.text


def test_a_run_that_resumes_from_the_previous_checkpoint_keeps_its_choice(tmp_path):
    recorded = tune._with(UNSETTLED, {key: f"my {key}" for key in TUNED})
    folder = RunDir(tmp_path)
    folder.checkpoints.mkdir()
    folder.previous.touch()
    OmegaConf.save(OmegaConf.create(recorded.plain()), tmp_path / "config.yaml")
    assert tune.tune(UNSETTLED, folder) == recorded


def test_without_the_feature_a_run_says_what_it_lacks(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(doors, "features", lambda: ())  # as if its folder were deleted
    expected = "perf.channels_last, .*: null is measured by medconv.features.autotune, which this"
    with pytest.raises(ConfigError, match=expected):
        tiny.train(dataset, tmp_path / "run", *AUTO)
