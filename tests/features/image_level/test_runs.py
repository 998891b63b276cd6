"""Runs on whole images, from a folder or table to a summary: what they are judged by, go on with, and
refuse.
"""

import csv
import json

import numpy as np
import pytest
import torch
from helpers import ranks, tiny
from helpers import small_runs as smallruns

from medconv.config import ConfigError
from medconv.features.image_level import metrics as image_level
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.inference.load import load
from medconv.targets.scores import CROSS_ENTROPY, MAE
from medconv.training.callbacks import nonfinite_guard
from medconv.utils import checkpoint_io
from medconv.utils.exit_codes import DONE

OURS = smallruns.OURS
QUIET = ["logger=none"]
FAST = [
    "optimizer=adamw",
    "optimizer.lr=0.02",
    "scheduler=constant",
    "scheduler.warmup_steps=0",
    "weight_averaging=none",
    "augmentation=none",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return smallruns.write_classes(tmp_path_factory.mktemp("classes") / "light")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    return smallruns.write_table(tmp_path_factory.mktemp("numbers") / "table", {"label": "number"})


def test_classes_train_validate_and_say_so(folder, tmp_path):
    settings = [*OURS, *FAST, "trainer.max_steps=24", "data.samples_per_epoch=48", "callbacks=default"]
    summary = smallruns.train(folder, tmp_path / "run", *settings)
    assert summary["status"] == "done" and summary["val/auc"] > 0.9 and summary["val/dice"] is None
    assert summary["score"] == CROSS_ENTROPY.plain()
    record = checkpoint_io.read(tmp_path / "run/checkpoints/best.ckpt")["medconv"]
    assert record["targets"] == {"kind": "multiclass", "names": ["bright", "dark"]}
    assert record["validation"] == summary["val/cases"] and len(summary["val/cases"]) == 7
    targets = ImageLevelTargets.from_plain(record["targets"])
    again = image_level.measure(targets, *targets.arrays(list(record["validation"].values())))
    assert {name: summary[f"val/{name}"] for name in again} == again
    assert summary["val/cross_entropy"] > 0
    assert summary["val/temperature"] == record["temperature"] >= 1
    shown = smallruns.image_tags(tmp_path / "run")
    assert {
        "images/val/confusion",
        "images/val/roc",
        "images/val/precision_recall",
        "images/val/reliability",
    } <= shown
    assert len([tag for tag in shown if tag.startswith("images/worst/")]) == 3
    assert len([tag for tag in shown if tag.startswith("images/train/sample")]) == 3
    model = load(tmp_path / "run/checkpoints/best.ckpt")
    assert model.targets == MulticlassTargets(("bright", "dark"))
    assert model.network(torch.zeros(1, 1, *model.window.patch_size)).shape == (1, 2)
    assert smallruns.train(folder, tmp_path / "run", *settings) == summary  # finished


def test_numbers_keep_the_lowest_error(numbers, tmp_path):
    """The error is in the units of the table; early stopping and the best checkpoint follow it."""
    stops = ["early_stopping=patience", "early_stopping.patience=50", *QUIET, *FAST]
    summary = smallruns.train(
        numbers, tmp_path / "run", "data.target_type=regression", *OURS, *stops, "trainer.max_steps=30"
    )
    assert summary["score"] == MAE.plain() and summary["val/mae"] < 30
    targets = ImageLevelTargets.from_plain(summary["targets"])
    outputs, truth = targets.arrays(list(summary["val/cases"].values()))
    assert np.abs(outputs - truth).mean() == pytest.approx(summary["val/mae"]) and truth.min() >= 1000
    errors = column(tmp_path / "run", "val/mae")
    assert summary["val/mae"] == pytest.approx(min(errors), rel=1e-4)
    content = checkpoint_io.read(tmp_path / "run/checkpoints/last.ckpt")
    (best,) = (state["best_score"] for state in content["callbacks"].values() if "best_score" in state)
    assert float(best) == pytest.approx(min(errors), rel=1e-4)
    model = load(tmp_path / "run/checkpoints/best.ckpt")
    assert 900 < float(model.network(torch.zeros(1, 1, *model.window.patch_size)).detach()) < 1200
    assert not any("value_" in key for key in content["state_dict"])


def column(run, name):
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_findings_train_with_the_loss_of_classes_or_their_own(tmp_path):
    table = smallruns.write_table(tmp_path / "table", {"glow": "finding", "odd": "other"})
    columns = "data.label_columns=[glow,odd]"
    for loss in ("cross_entropy", "bce"):
        more = [f"loss={loss}", "loss.class_weights=balanced", "task.mixup=0.2", *OURS, *QUIET]
        summary = smallruns.train(table, tmp_path / loss, columns, *more)
        assert summary["status"] == "done" and summary["val/auc"] is not None
        assert all(len(row["outputs"]) == 2 for row in summary["val/cases"].values())


# two large ones by night: their building and their blocks have tests in test_monai_networks.py
MODELS = ["resnet", "densenet", "customconv", "encoder"]
MODELS += [pytest.param(name, marks=pytest.mark.slow) for name in ("efficientnet", "senet")]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_takes_a_step(folder, tmp_path, model):
    smaller = {
        "resnet": ["model.widen_factor=0.1"],
        "densenet": ["model.block_config=[1,1,1]", "model.init_features=8", "model.growth_rate=4"],
        "senet": ["model.layers=[1,1,1,1]"],
    }
    overrides = (
        [o for o in OURS if not o.startswith("model=")]
        if model in ("customconv", "encoder")
        else smaller.get(model, [])
    )
    fast = ["trainer.max_steps=1", "perf.activation_checkpointing=blocks", *QUIET]
    summary = smallruns.train(folder, tmp_path / "run", f"model={model}", *overrides, *fast)
    assert summary["status"] == "done" and len(summary["val/cases"]) == 7
    assert load(tmp_path / "run/checkpoints/last.ckpt").targets.kind == "multiclass"


@pytest.mark.parametrize("conv", ["basis", "mirror", "bottleneck", "se"])
def test_other_convolutions_fit(folder, tmp_path, conv):
    more = [
        *OURS,
        f"conv={conv}",
        "model.channels=[8,16]",
        "trainer.max_steps=2",
        "trainer.accumulate_grad_batches=2",
        *QUIET,
    ]
    summary = smallruns.train(folder, tmp_path / "run", *more)
    assert summary["status"] == "done"
    model = load(tmp_path / "run/checkpoints/last.ckpt")
    image = torch.randn(2, 1, *model.window.patch_size)
    with torch.no_grad():
        outputs, mirrored = model.network(image), model.network(image.flip(2))
    assert torch.allclose(outputs, mirrored, atol=1e-4) == (conv == "mirror")


def test_a_network_that_cannot_be_mirrored_says_which_can(folder, tmp_path):
    with pytest.raises(
        ConfigError, match=r"conv: cannot make .* layer layer2.* model=encoder keeps the symmetry"
    ):
        smallruns.train(
            folder, tmp_path / "run", "model=resnet", "model.widen_factor=0.125", "conv=mirror", *QUIET
        )


def test_a_run_that_goes_on_ends_as_one_that_never_stopped(folder, tmp_path):
    same = [*OURS, *QUIET, "task.mixup=0.4", "weight_averaging.begin=2", "data.samples_per_epoch=12"]
    same.append("scheduler.warmup_steps=0")  # else it would be a fifth of a run
    whole = smallruns.train(folder, tmp_path / "whole", *same, "scheduler=constant", "trainer.max_steps=6")
    smallruns.train(folder, tmp_path / "half", *same, "scheduler=constant", "trainer.max_steps=3")
    more = [f"run.resume={tmp_path / 'half/checkpoints/last.ckpt'}", "trainer.max_steps=6"]
    rest = smallruns.train(folder, tmp_path / "rest", *same, "scheduler=constant", *more)
    assert whole["steps"] == rest["steps"] == 6
    states = [
        torch.load(tmp_path / n / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for n in ("whole", "rest")
    ]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=0, atol=0)


def test_two_processes_give_the_result_of_one(folder, tmp_path):
    """Seven cases on two ranks: each counts once. Weighted, since a mean over samples is that of any
    division of them.
    """
    same = [
        *OURS,
        *QUIET,
        "model.norm=instance",
        "optimizer=sgd",
        "data.num_folds=3",
        "loss=cross_entropy",
        "loss.class_weights=[1,3]",
    ]
    one = smallruns.train(folder, tmp_path / "one", *same, "data.batch_size=4")
    arguments = smallruns.overrides(
        folder, *same, "data.batch_size=2", "trainer.devices=2", f"run.dir={tmp_path / 'two'}"
    )
    ended = ranks.run(*arguments, cwd=tmp_path)
    assert ended.codes == [DONE, DONE], ended.stderr
    two = json.loads((tmp_path / "two/summary.json").read_text())
    assert two["steps"] == one["steps"] == 6 and two["hardware"]["devices"] == 2
    assert list(two["val/cases"]) == list(one["val/cases"])
    for case, row in one["val/cases"].items():
        assert two["val/cases"][case]["outputs"] == pytest.approx(row["outputs"], abs=1e-4)


def test_accumulated_batches_are_one_larger_batch(folder, tmp_path):
    same = [
        *OURS,
        *QUIET,
        "model.norm=instance",
        "optimizer=sgd",
        "loss=cross_entropy",
        "loss.class_weights=balanced",
        "trainer.max_steps=3",
    ]
    one = smallruns.train(folder, tmp_path / "one", *same, "data.batch_size=4")
    two = smallruns.train(
        folder, tmp_path / "two", *same, "data.batch_size=2", "trainer.accumulate_grad_batches=2"
    )
    for case, row in one["val/cases"].items():
        assert two["val/cases"][case]["outputs"] == pytest.approx(row["outputs"], abs=1e-4)


def test_a_step_that_is_not_finite_is_saved_with_its_layers(folder, tmp_path):
    explodes = ["optimizer=sgd", "optimizer.lr=1e30", "trainer.gradient_clip_val=null", "task.mixup=0.3"]
    with pytest.raises(nonfinite_guard.NonfiniteError, match="in case .*light|bright|dark"):
        smallruns.train(folder, tmp_path / "run", *OURS, *QUIET, *explodes)
    (file,) = (tmp_path / "run/nonfinite").glob("*.ckpt")
    assert any(row["bad"] for row in torch.load(file, weights_only=True)["nonfinite"]["rows"])


def test_perf_auto_measures_whole_images(numbers, tmp_path):
    auto = [
        "perf=autotune",
        "perf.auto_seconds=1",
        "data.target_type=regression",
        "trainer.precision=32-true",
        "trainer.max_steps=2",
    ]
    summary = smallruns.train(numbers, tmp_path / "run", *OURS, *QUIET, *auto)
    assert summary["status"] == "done"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["loss=dice_ce"], "DiceCrossEntropy is for label_map and regions .*use loss=cross_entropy"),
        (
            ["loss=huber"],
            "loss: RegressionLoss is for regression targets, but the data has multiclass targets; "
            "use loss=cross_entropy",
        ),
        (
            ["model=segresnet"],
            r"model must return logits of shape \(1, 2\) \(batch, outputs\), it returns .*model=resnet",
        ),
        (["task.mixup=-1"], r"task.mixup must be at least 0 and finite, got -1"),
        (["task.mirror_axes=[2]", *OURS], "task.mirror_axes must be different spatial axes from 0 to 1"),
        (
            ["loss=cross_entropy", "loss.class_weights=[1,2,3]", *OURS],
            "loss: class_weights must be 2 numbers, one per output, got 3",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(folder, tmp_path, more, message):
    with pytest.raises(ValueError, match=message) as caught:
        smallruns.train(folder, tmp_path / "run", *more, *QUIET)
    assert "\n" not in str(caught.value)


def test_settings_for_images_do_not_fit_label_maps(tmp_path):
    dataset = tiny.write_dataset(tmp_path / "tiny", cases=3)
    with pytest.raises(
        ValueError, match=r"loss: CrossEntropy is for multiclass targets, but the data has label"
    ):
        tiny.train(dataset, tmp_path / "run", "loss=cross_entropy")
    with pytest.raises(
        ValueError, match=r"task.mixup=0.2 is for image-level targets, but the data has label_map targets"
    ):
        tiny.train(dataset, tmp_path / "run", "task.mixup=0.2")


def test_a_checkpoint_of_another_task_is_refused(folder, numbers, tmp_path):
    smallruns.train(
        numbers, tmp_path / "first", "data.target_type=regression", *OURS, *QUIET, "trainer.max_steps=1"
    )
    path = tmp_path / "first/checkpoints/last.ckpt"
    with pytest.raises(
        ValueError, match=r"another task: it is for regression label .*this run for multiclass bright, dark"
    ):
        smallruns.train(folder, tmp_path / "run", *OURS, *QUIET, f"run.resume={path}")
