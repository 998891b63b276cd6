"""medconv/training/checkpoint/compatibility.py: why a checkpoint does not fit a run."""

from dataclasses import asdict, replace

import pytest
from helpers import tiny
from helpers.configs import derived
from torch import nn

from medconv.config import InitConfig
from medconv.targets import all_kinds
from medconv.targets.label_map import LabelMapTargets
from medconv.training.checkpoint import compatibility

SETTING = "run.resume=last.ckpt"
LABEL_MAPS = derived(num_classes=2, targets=LabelMapTargets.of_classes(["background", "box"]).plain())


def image_level(kind):
    targets = all_kinds()[kind](names=("left", "right"))
    return derived(spatial_dims=2, num_channels=2, num_classes=2, targets=targets.plain())


def content(saved):
    return {"medconv": {"config": {"derived": asdict(saved)}}}


@pytest.mark.parametrize("saved", [LABEL_MAPS, image_level("multilabel")])
def test_a_checkpoint_of_the_same_task_passes(saved):
    compatibility.check_same_task(content(saved), replace(saved, patch_size=[8, 8, 8]), SETTING)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (replace(LABEL_MAPS, num_channels=2), r"box \(2 outputs\) in 3D images of 2 channels"),
        (replace(LABEL_MAPS, spatial_dims=2), "in 2D images of 1 channel,"),
        (image_level("multiclass"), r"multiclass left, right \(2 outputs\) in 2D images of 2 channels"),
    ],
)
def test_a_checkpoint_of_another_task_is_described(saved, words):
    with pytest.raises(ValueError, match=rf"^{SETTING}: a checkpoint of another task: it is for .*{words}"):
        compatibility.check_same_task(content(saved), LABEL_MAPS, SETTING)


def test_channels_in_another_order_are_another_task():
    saved = content(LABEL_MAPS)
    saved["medconv"]["modalities"] = ["T1", "T2"]
    compatibility.check_same_task(saved, replace(LABEL_MAPS, modalities=["T1", "t2"]), SETTING)
    with pytest.raises(ValueError, match="its channels are T1, T2, here in another order: T2, T1"):
        compatibility.check_same_task(saved, replace(LABEL_MAPS, modalities=["T2", "T1"]), SETTING)


def test_targets_of_another_kind_are_another_task():
    saved = content(image_level("multiclass"))
    with pytest.raises(
        ValueError, match="is for multiclass left, right .*, this run for multilabel left, right"
    ):
        compatibility.check_same_task(saved, image_level("multilabel"), SETTING)


def test_weights_that_do_not_fit_are_named():
    module, other = nn.Linear(2, 3), nn.Linear(2, 4)
    state = module.state_dict()
    compatibility.check_weights_fit(module, {"state_dict": state}, SETTING)
    for weights, words in (
        ({"weight": state["weight"]}, "bias is missing in it"),
        ({**state, "scale": state["bias"]}, "scale is not in the network"),
        (other.state_dict(), r"weight is \(4, 2\) in it, here \(3, 2\); bias is \(4,\) in it, here \(3,\)"),
    ):
        with pytest.raises(ValueError, match=rf"^{SETTING}: its weights do not fit this network: {words}$"):
            compatibility.check_weights_fit(module, {"state_dict": weights}, SETTING)


def test_a_run_does_not_resume_with_another_optimizer_or_other_settings_of_it(dataset, tmp_path):
    """torch's optimizers take their settings from the checkpoint; the learning rate is the schedule's."""
    trained = ("optimizer=adamw", "+optimizer.betas=[0.5,0.9]")
    tiny.train(dataset, tmp_path / "first", *trained, "trainer.max_steps=2")
    last = tmp_path / "first/checkpoints/last.ckpt"
    for settings, words in (
        ([], r"_target_=torch\.optim\.AdamW, this run has medconv"),
        (["optimizer=adamw"], r"betas=\[0\.5, 0\.9\], this run has its default; use the same, or init"),
        ([*trained, "optimizer.weight_decay=0.5"], r"weight_decay=0\.01, this run has 0\.5;"),
    ):
        with pytest.raises(ValueError, match=rf"run\.resume=.* trained with optimizer\.{words}"):
            tiny.train(dataset, tmp_path / "second", *settings, f"run.resume={last}")
    same = tiny.train(dataset, tmp_path / "third", *trained, "optimizer.lr=1e-4", f"run.resume={last}")
    assert same["status"] == "done"


def test_fsdp_goes_on_from_fsdp_alone():
    """Its states of the optimizer have other numbers."""
    saved = {"medconv": {"config": {"trainer": {"strategy": "auto"}}}}
    compatibility.check_same_sharding(saved, "ddp", "run.resume=a")
    with pytest.raises(
        ValueError, match=r"^run\.resume=a: was trained with trainer\.strategy=auto, this run has"
    ):
        compatibility.check_same_sharding(saved, "fsdp", "run.resume=a")


def test_parameters_thaw_when_they_did_and_nothing_frozen_is_written_in_any_way():
    saved = {"medconv": {"config": {"init": dict.fromkeys(("freeze", "lr_multipliers", "thaw_at"))}}}
    compatibility.check_same_freezing(saved, InitConfig(freeze=[], lr_multipliers={}), SETTING)
    with pytest.raises(ValueError, match=r"was trained with init\.thaw_at=None, this run has 0\.5; use the"):
        compatibility.check_same_freezing(saved, InitConfig(thaw_at=0.5), SETTING)


def test_a_run_does_not_resume_with_a_schedule_that_is_not_ours(dataset, tmp_path):
    """It would go on with the rates of the other one, such as 0 at its end."""
    tiny.train(dataset, tmp_path / "first", "trainer.max_steps=2")
    last = tmp_path / "first/checkpoints/last.ckpt"
    other = ["scheduler._target_=torch.optim.lr_scheduler.StepLR", "+scheduler.step_size=9"]
    without = [f"~scheduler.{key}" for key in ("warmup_steps",)]
    with pytest.raises(ValueError, match=r"scheduler\._target_=medconv\S+, this run has torch\S+StepLR; use"):
        tiny.train(dataset, tmp_path / "second", *other, *without, f"run.resume={last}")
    # Nor the other way round: its state counts epochs, from which no progress of steps follows
    tiny.train(dataset, tmp_path / "torch", *other, *without, "trainer.max_steps=2")
    last = tmp_path / "torch/checkpoints/last.ckpt"
    with pytest.raises(ValueError, match=r"scheduler\._target_=torch\S+StepLR, this run has medconv"):
        tiny.train(dataset, tmp_path / "third", f"run.resume={last}")


def test_epochs_of_another_length_are_counted_as_those_of_the_run(dataset, tmp_path):
    """Else nothing would be trained."""
    length = ["trainer.max_steps=-1", "data.samples_per_epoch=8", "logger=none"]
    tiny.train(dataset, tmp_path / "first", *length, "data.batch_size=1", "trainer.max_epochs=1")
    last = f"run.resume={tmp_path / 'first/checkpoints/last.ckpt'}"
    larger = ["data.batch_size=2", last]  # 8 batches are two epochs of 4
    with pytest.raises(
        ValueError, match=r"2 epochs of 4 batches, .*max_epochs must be more than 2 .* got 2$"
    ):
        tiny.train(dataset, tmp_path / "none", *length, *larger, "trainer.max_epochs=2")
    assert tiny.train(dataset, tmp_path / "more", *length, *larger, "trainer.max_epochs=3")["steps"] == 12


def test_a_length_that_the_checkpoint_has_reached_is_an_error(dataset, tmp_path):
    tiny.train(dataset, tmp_path / "first", "trainer.max_steps=2", "data.samples_per_epoch=4")  # an epoch
    last = tmp_path / "first/checkpoints/last.ckpt"
    for unit, limit in (("steps", 1), ("steps", 2), ("epochs", 1)):
        length = [f"trainer.max_{unit}={limit}", *["trainer.max_steps=-1"] * (unit == "epochs")]
        with pytest.raises(
            ValueError, match=rf"run\.resume=.* {unit} already; trainer\.max_{unit} must be .* got {limit}$"
        ):
            tiny.train(dataset, tmp_path / "second", f"run.resume={last}", *length)
