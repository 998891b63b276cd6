"""medconv/training/loggers.py: the log of a run, its curves, metrics.csv and TensorBoard."""

import csv
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

from medconv.config import DataConfig, Derived, PerfConfig, RunConfig, TaskConfig, TrainerConfig
from medconv.training import loggers
from medconv.training.growing_patch import GrowingPatch
from medconv.training.loggers import CsvLogger, TensorBoard
from medconv.training.run_dir import RunDir

PLAIN = PerfConfig(channels_last=False, fast_norm=False, compile=False)
CONFIG = RunConfig(
    data=DataConfig(batch_size=3, spacing_mm=[1, 2]),
    model={"_target_": "torch.nn.Linear"},
    loss={"class_weights": {"lesion": 4}},
    trainer=TrainerConfig(accelerator="cpu", benchmark=True),
    perf=PLAIN,
    derived=Derived(patch_size=[32, 48], spacing_mm=[0.5, 1.25], slice_axis=2, per_voxel=True),
)
PARAMETERS = {
    "data.batch_size": 3.0,
    "data.spacing_mm": "[1, 2]",
    "data.fold": 0.0,
    "model._target_": "torch.nn.Linear",
    "perf.compile": False,
}


def trainer(loggers=False, **settings):
    return L.Trainer(accelerator="cpu", devices=1, logger=loggers, enable_checkpointing=False, **settings)


def test_a_run_announces_its_data_patch_model_trainer_and_folder(caplog):
    accumulating = trainer(accumulate_grad_batches=4)
    task = SimpleNamespace(network=nn.Linear(100, 100, bias=False), growing_patch=GrowingPatch((8, 8)))
    caplog.clear()  # of Lightning's messages
    caplog.set_level(logging.INFO, "medconv")
    prepared = SimpleNamespace(dataset=SimpleNamespace(name="Tiny"), train=range(5), val=range(2))
    config = replace(CONFIG, data=replace(CONFIG.data, global_batch_size=6))
    loggers.announce(config, prepared, task, accumulating, RunDir(Path("runs/x")))
    assert caplog.messages == [
        "data: Tiny, 5 cases to train on, 2 to validate",
        "patch: 32 x 48 voxels of 0.5 x 1.25 mm, 24 samples in each step",
        "batch: 6 samples on each device, computed 3 at a time",
        "patches grow: 6 sizes, from 16 x 24 voxels",
        "slices: 2D, across the superior axis of the volumes",
        "model: torch.nn.Linear, 0.01 million parameters",
        "loss: class weights {'lesion': 4}",
        "trainer: 1 x cpu, precision 32-true",
        "run: runs/x",
        "trainer.benchmark=true has no effect: cuDNN runs on NVIDIA GPUs only",
    ]


def test_a_run_says_why_its_patches_have_few_sizes(caplog):
    caplog.set_level(logging.INFO, "medconv")
    growing = GrowingPatch((8, 8), max_sizes=4)
    task = SimpleNamespace(network=nn.Linear(1, 1), growing_patch=growing)
    prepared = SimpleNamespace(dataset=SimpleNamespace(name="Tiny"), train=(), val=())
    loggers.announce(CONFIG, prepared, task, trainer(), RunDir(Path("runs/x")))
    line = "patches grow: 4 sizes, from 16 x 24 voxels; at most 4, since cuDNN tries its algorithms for each"
    assert line in caplog.messages


def without_effect(network, **changes):
    config = replace(CONFIG, **{"trainer": TrainerConfig(accelerator="cpu"), **changes})
    return loggers.without_effect(config, network)


NORMS = nn.Sequential(nn.Conv3d(1, 2, 1), nn.InstanceNorm3d(2))


def test_fast_norm_without_such_norms_is_named():
    perf = PerfConfig(channels_last=True, fast_norm=True)
    assert without_effect(NORMS, perf=perf) == []
    (line,) = without_effect(nn.Sequential(nn.Conv3d(1, 2, 1)), perf=perf)
    assert line == "perf.fast_norm=true has no effect: this network has no instance, group or batch norms"


DEPTHWISE = nn.Sequential(nn.Conv3d(4, 4, 3, groups=4), nn.InstanceNorm3d(4))


@pytest.mark.parametrize(
    ("network", "setting", "precision", "line"),
    [
        (DEPTHWISE, True, "bf16-mixed", None),
        (DEPTHWISE, True, "32-true", "perf.fast_depthwise=true has no effect: it is for bf16 on a CPU"),
        (DEPTHWISE, False, "bf16-mixed", None),
        (NORMS, True, "32-true", None),  # the default
        (
            NORMS,
            False,
            "32-true",
            "perf.fast_depthwise=false has no effect: the network has no depthwise 3D convolutions",
        ),
    ],
)
def test_fast_depthwise_without_effect_is_named(network, setting, precision, line):
    perf = replace(PLAIN, fast_depthwise=setting)
    trainer = TrainerConfig(accelerator="cpu", precision=precision)
    assert without_effect(network, perf=perf, trainer=trainer) == ([] if line is None else [line])


def test_switches_without_effect_are_named_with_the_reason():
    assert without_effect(NORMS) == []
    trainer = TrainerConfig(accelerator="cpu", benchmark=True)
    assert without_effect(NORMS, perf=replace(PLAIN, cuda_graphs=True), trainer=trainer) == [
        "trainer.benchmark=true has no effect: cuDNN runs on NVIDIA GPUs only",
        "perf.cuda_graphs=true has no effect: there is no GPU to replay them on",
    ]
    perf = PerfConfig(channels_last=False, activation_checkpointing="pointwise", compile=True)
    assert [line.split(" ")[0] for line in without_effect(NORMS, perf=perf)] == [
        "perf.fast_norm=true",
        "perf.activation_checkpointing=pointwise",
    ]
    limited = TrainerConfig(accelerator="cpu", limit_test_batches=2)
    lines = without_effect(NORMS, trainer=limited)
    assert lines == ["trainer.limit_test_batches has no effect: a run tests with test=true only"]
    assert without_effect(NORMS, trainer=limited, test=True) == []


def test_keys_of_workers_and_windows_are_named_where_there_are_none():
    loading = DataConfig(num_workers=0, prefetch_factor=4)
    assert without_effect(NORMS, data=loading) == [
        "data.prefetch_factor has no effect: data.num_workers=0 loads each batch when it is needed"
    ]
    assert without_effect(NORMS, data=replace(loading, num_workers=1)) == []
    windows = TaskConfig(overlap=0.25, sw_batch_size=1)
    assert without_effect(NORMS, task=windows) == []
    whole_images = replace(CONFIG.derived, per_voxel=False)
    assert without_effect(NORMS, task=windows, derived=whole_images) == [
        "task.overlap has no effect: the network takes whole images, not windows of them",
        "task.sw_batch_size has no effect: the network takes whole images, not windows of them",
    ]


def test_tensorboard_shows_the_config_and_the_plan_as_text(tmp_path):
    board = TensorBoard(tmp_path, name="", version="tensorboard")
    plan = SimpleNamespace(rows=(("patch", "32 x 48", "the median image"),))
    loggers.log_start_texts(trainer([board]), CONFIG, plan)
    board.finalize("success")
    events = EventAccumulator(board.log_dir).Reload()
    texts = {
        name: events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()
        for name in ("config", "plan")
    }
    assert "    patch_size:" in texts["config"]
    assert texts["plan"] == "    patch  32 x 48  the median image\n"


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [("", PARAMETERS), ('{"data.fold": "1", "conv": "separable"}', {"data.fold": 1.0, "conv": "separable"})],
)
def test_tensorboard_shows_all_hyperparameters_or_those_of_a_sweep_with_the_best_score(
    tmp_path, monkeypatch, sweep, expected
):
    """Other loggers get all hyperparameters in both cases."""
    monkeypatch.setenv(loggers.HPARAMS, sweep)
    folder, board = RunDir(tmp_path), TensorBoard(tmp_path, name="", version="tensorboard")
    other = CSVLogger(tmp_path)
    score = {"name": "val/mae", "words": "mean absolute error", "mode": "min"}
    folder.write_summary(**{"score": score, "val/mae": 0.25, "val/dice": 0.5})
    for step, best in enumerate((0.5, 0.25)):
        board.log_metrics({"val/mae_best": best, "val/dice": 0.5}, step)
    loggers.log_hyperparameters(trainer([board, other]), CONFIG, folder)
    events = EventAccumulator(board.log_dir).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    page = HParamsPluginData.FromString(content).session_start_info.hparams
    shown = {key: getattr(value, value.WhichOneof("kind")) for key, value in page.items()}
    assert shown.items() >= expected.items() and (shown == expected) == bool(sweep)
    experiment = events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    (metric,) = HParamsPluginData.FromString(experiment).experiment.metric_infos
    assert [event.value for event in events.Scalars(metric.name.tag)] == [0.5, 0.25]
    assert other.experiment.hparams.items() >= PARAMETERS.items()


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


def test_there_is_no_curve_of_the_epoch(tmp_path):
    board = TensorBoard(tmp_path, name=None, version="tensorboard")
    board.log_metrics({"epoch": 0, "train/loss": 0.5}, 7)
    board.log_metrics({"epoch": 1}, 8)
    board.finalize("success")
    events = EventAccumulator(board.log_dir).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(7, 0.5)]
