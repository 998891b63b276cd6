"""Whole runs on a tiny dataset: what a run leaves, that it agrees with predict and evaluate, restarts,
equal results.
"""

import dataclasses
import json
import math
from importlib.metadata import version
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import clock, tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from medconv.config import ConfigError
from medconv.evaluation.segmentation import evaluate
from medconv.inference import predict
from medconv.inference.inputs import find_cases
from medconv.inference.load import load
from medconv.inference.predictor import Predictor
from medconv.training import run

WHOLE = "schedule.patch=whole"  # as compiled runs have it
GOLDEN = Path(__file__).parent / "golden.json"


DONE = ["trainer.max_steps=40", "data.samples_per_epoch=40", "optimizer.lr=2e-2", "callbacks=default"]


@pytest.fixture(scope="module")
def done(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "done"
    tiny.train(dataset, folder, *DONE)
    return folder


def test_a_run_leaves_what_it_promises(done):
    summary = json.loads((done / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["steps"] == 40
    assert set(summary["val/dice_per_class"]) == {"box", "hole"}
    assert summary["val/dice"] == pytest.approx(np.mean(list(summary["val/dice_per_class"].values())))
    assert summary["val/dice"] > 0.3
    for key in ("wall_seconds", "samples_per_second", "peak_memory_bytes"):
        assert summary[key] > 0
    assert 0 <= summary["data_wait_share"] <= 1
    assert summary["versions"]["torch"] == version("torch")
    assert {"hardware", "git_commit", "command"} <= set(summary)
    for name in ("config.yaml", "metrics.csv", "checkpoints/best.ckpt", "checkpoints/last.ckpt"):
        assert (done / name).stat().st_size > 0, name


def test_tensorboard_has_curves_pictures_and_hyperparameters(done):
    events = EventAccumulator(str(done / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    tags = events.Tags()
    scalars = {
        "train/loss",
        "val/dice",
        "val/dice/box",
        "train/lr",
        "val/dice_best",
        "perf/samples_per_second",
        "perf/data_wait_share",
    }
    assert scalars <= set(tags["scalars"])
    assert {tag.split("/")[0] for tag in tags["scalars"]} == {"train", "val", "perf"}
    assert all(len(events.Scalars(tag)) > 1 for tag in tags["scalars"])  # a curve has several points
    assert {"images/train/sample 0", "images/val/case_1"} & set(tags["images"])
    assert {tag.split("/")[0] for tag in tags["images"]} == {"images", "kernels"}
    (text,) = events.Tensors("config/text_summary")[0].tensor_proto.string_val
    assert "    optimizer:\n" in text.decode() and "seed: 0" in text.decode()
    assert events.Scalars("val/dice_best")[-1].value == pytest.approx(
        json.loads((done / "summary.json").read_text())["val/dice"]
    )


def test_predict_and_evaluate_give_the_numbers_of_validation(done, dataset, tmp_path):
    recorded = json.loads((done / "summary.json").read_text())["val/cases"]
    images = tmp_path / "images"
    images.mkdir()
    for case in recorded:
        (images / f"{case}.nii.gz").symlink_to(dataset / "imagesTr" / f"{case}.nii.gz")
    model = load(done / "checkpoints" / "best.ckpt")
    predictor = Predictor([model])
    output = predict.output_in(tmp_path / "out", predictor)
    predict.predict(predictor, find_cases(images, 1), output)
    result = evaluate(tmp_path / "out", dataset / "labelsTr").result
    assert {row["case"]: row["dice"] for row in result["cases"]} == recorded
    for case in recorded:
        image, label = (nib.load(p / f"{case}.nii.gz") for p in (images, tmp_path / "out"))
        assert image.shape == label.shape
        assert np.array_equal(image.affine, label.affine)


def test_a_finished_run_is_not_trained_again(done, dataset):
    before = (done / "checkpoints" / "last.ckpt").stat().st_mtime_ns
    again = tiny.train(dataset, done, *DONE)
    assert again["status"] == "done"
    assert (done / "checkpoints" / "last.ckpt").stat().st_mtime_ns == before


def test_a_folder_of_another_config_is_refused(done, dataset):
    with pytest.raises(ConfigError, match=r"optimizer.lr: 0.02 there, 0.5 now"):
        tiny.train(dataset, done, *DONE, "optimizer.lr=0.5")


def test_resume_never_moves_the_old_run_aside(dataset, tmp_path):
    tiny.train(dataset, tmp_path / "run")
    tiny.train(dataset, tmp_path / "run", "run.resume=never", "optimizer.lr=0.5")
    assert len(list(tmp_path.glob("run*"))) == 2


def test_two_dimensions(tmp_path):
    dataset = tiny.write_dataset(tmp_path / "flat", shape=(16, 20, 1))
    tiny.train(dataset, tmp_path / "run")
    model = load(tmp_path / "run/checkpoints/best.ckpt")
    predictor = Predictor([model])
    output = predict.output_in(tmp_path / "out", predictor)
    predict.predict(predictor, find_cases(dataset / "imagesTr", 1), output)
    assert nib.load(tmp_path / "out/case_0.nii.gz").shape == (16, 20, 1)


@pytest.mark.parametrize(
    ("model", "conv"),
    [
        ("monai_unet", "none"),
        pytest.param("monai_unet", "transform", marks=pytest.mark.slow),
        pytest.param("dynunet", "transform", marks=pytest.mark.slow),
        ("segresnet", "transform"),
        ("resenc", "smooth conv.throughout=true"),
    ],
)
def test_other_networks_take_the_same_convolutions(dataset, tmp_path, model, conv):
    small = [o for o in tiny.overrides(dataset) if not o.startswith("model.")]
    small += ["trainer.max_steps=1", "data.patch_size=[16,16,16]", "plan.channels=[4,8,8]", f"model={model}"]
    small += f"conv={conv}".split()
    checked = tiny.config.validate(tiny.composed(*small, f"run.dir={tmp_path / 'run'}"))
    summary = run.train(checked, tiny.RunDir.of(checked, {}))
    assert summary["status"] == "done"
    state = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert any("parametrizations" in key for key in state) == (conv != "none")
    load(tmp_path / "run/checkpoints/last.ckpt")


OTHERS = ["basis", "ball", "spacing", "smooth", "masked", "mirror", "bottleneck", "separable", "acs", "se"]


@pytest.mark.parametrize(
    "conv",
    [
        *OTHERS,
        "turns conv.axes=[]",  # the tiny network's four channels are four copies
        "smooth conv.throughout=true",
        "smooth conv.share=0.5 conv.throughout=true",
    ],
)
def test_every_convolution_trains_and_comes_back_folded(dataset, tmp_path, conv):
    assert tiny.train(dataset, tmp_path / "run", *f"conv={conv}".split())["status"] == "done"
    model = load(tmp_path / "run/checkpoints/last.ckpt")
    assert not any(type(m).__module__.startswith("medconv.convs") for m in model.network.modules())


def test_every_conv_option_is_trained_here():
    options = {path.stem for path in (tiny.config.conf_dir() / "conv").glob("*.yaml")}
    assert options == {*OTHERS, "turns", "none", "transform"}


def test_convolutions_in_mm_take_the_spacing_of_the_data(dataset, tmp_path):
    """Voxels of 1 x 1.5 x 2 mm: a ball of 1.6 mm leaves out the neighbours across slices, in both stages."""
    tiny.train(dataset, tmp_path / "run", "conv=ball", "conv.radius_mm=1.6")
    model = load(tmp_path / "run/checkpoints/last.ckpt")
    for name in ("encoder.0.0", "encoder.1.0"):
        weight = model.network.get_submodule(name).weight
        assert not weight[..., 0].any() and not weight[..., 2].any() and weight[:, :, :, 1, 1].all()


def test_mirror_test_time_augmentation_is_skipped_where_it_changes_nothing(dataset, tmp_path, caplog):
    settings = ["conv=mirror", "conv.axes=[0]", "augmentation.mirror_axes=[1]", "task.mirror_axes=[0,1]"]
    with caplog.at_level("INFO", logger="medconv"):
        tiny.train(dataset, tmp_path / "run", *settings)
    assert "mirror_axes: [0] skipped, the network is equivariant along them" in caplog.text
    model = load(tmp_path / "run/checkpoints/last.ckpt")
    assert model.window.mirror_axes == (1,)
    image = torch.randn(1, 1, *model.window.patch_size)
    ours, both = (dataclasses.replace(model.window, mirror_axes=axes) for axes in ((1,), (0, 1)))
    with torch.no_grad():
        torch.testing.assert_close(
            ours(model.network, image), both(model.network, image), rtol=1e-3, atol=1e-4
        )


def test_pretrained_dense_weights_are_projected_into_a_convolution(dataset, tmp_path, caplog):
    tiny.train(dataset, tmp_path / "dense")
    checkpoint = tmp_path / "dense/checkpoints/last.ckpt"
    mask = [[[1, 1, 1], [1, 1, 1], [0, 0, 0]]] * 3
    frozen = [
        "optimizer.lr=0",
        f"init.pretrained={checkpoint}",
        "conv=masked",
        f"conv.mask={mask}".replace(" ", ""),
    ]
    with caplog.at_level("INFO", logger="medconv"):
        tiny.train(dataset, tmp_path / "run", "conv.init_from_weights=true", *frozen)
    assert "weights kept with a relative error of 0." in caplog.text
    dense, ours = (load(tmp_path / name / "checkpoints/last.ckpt").network for name in ("dense", "run"))
    name = "encoder.1.0.weight"
    expected = dense.get_parameter(name) * torch.tensor(mask)
    torch.testing.assert_close(ours.get_parameter(name), expected)


def test_golden_losses(dataset, tmp_path):
    """A refactor must reproduce these; after a change that is meant, store the new ones (see the message)."""
    settings = [
        "trainer.max_steps=8",
        "data.samples_per_epoch=16",
        "trainer.deterministic=true",
        "conv=transform",
    ]
    tiny.train(dataset, tmp_path / "run", *settings)
    losses = tiny.losses(tmp_path / "run")
    golden = json.loads(GOLDEN.read_text())
    assert len(losses) == 8
    assert losses == pytest.approx(golden, rel=1e-3), f"new losses: {losses}"


def test_the_same_run_twice_is_the_same_bit_for_bit(dataset, tmp_path):
    weights = []
    for name, workers in (("a", 0), ("b", 2)):
        settings = ["trainer.deterministic=true", f"data.num_workers={workers}"]
        tiny.train(dataset, tmp_path / name, *settings)
        weights.append(torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True)["state_dict"])
    assert tiny.losses(tmp_path / "a") == tiny.losses(tmp_path / "b")
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.fixture(scope="module")
def instance_norm(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "instance_norm"
    tiny.train(dataset, folder, "model.norm=instance", WHOLE)
    return folder


@pytest.mark.parametrize(
    "switch",
    [
        *(
            "perf.activation_checkpointing=blocks",
            "perf.activation_checkpointing=pointwise",
            "perf.channels_last=false",
            "perf=memory",
        ),
        *("perf.fast_norm=false", "perf.fused_optimizer=false", "perf=reference"),
        *(
            pytest.param(f"perf.{s}", marks=pytest.mark.slow)
            for s in ("compile=true", "compile=true perf.activation_checkpointing=blocks")
        ),
    ],
)
def test_a_switch_does_not_change_the_training(instance_norm, dataset, tmp_path, switch):
    again = [] if switch.startswith("perf.") else ["trainer.precision=32-true"]
    settings = ["model.norm=instance", WHOLE, *switch.split(), *again]
    tiny.train(dataset, tmp_path / "switched", *settings)
    assert tiny.losses(tmp_path / "switched") == pytest.approx(tiny.losses(instance_norm), rel=1e-4)
    keys = [
        set(torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"])
        for folder in (instance_norm, tmp_path / "switched")
    ]
    assert keys[0] == keys[1]


def test_four_micro_batches_of_two_are_one_batch_of_eight(dataset, tmp_path):
    """Of cross-entropy, whose mean over a batch is the mean over its parts; a batch's Dice is none."""
    settings = [
        "model.norm=instance",
        "loss=dice_ce",
        "loss.dice_weight=0",
        "data.samples_per_epoch=32",
        "trainer.max_steps=4",
        "optimizer=sgd",
    ]
    tiny.train(dataset, tmp_path / "one", *settings, "data.batch_size=8")
    tiny.train(dataset, tmp_path / "four", *settings, "trainer.accumulate_grad_batches=4")
    weights = [
        torch.load(tmp_path / n / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for n in ("one", "four")
    ]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-3, atol=1e-5, msg=key)


def test_half_precision_learns_as_much(dataset, tmp_path):
    settings = ["trainer.max_steps=40", "data.samples_per_epoch=80", "optimizer.lr=1e-2"]
    for precision in ("32-true", "bf16-mixed"):
        tiny.train(dataset, tmp_path / precision, *settings, f"trainer.precision={precision}")
    single, half = (np.mean(tiny.losses(tmp_path / name)[-15:]) for name in ("32-true", "bf16-mixed"))
    assert half == pytest.approx(single, rel=0.03)
    assert single < 0.8 * np.mean(tiny.losses(tmp_path / "32-true")[:5])


def test_where_the_time_went_adds_up(done):
    summary = json.loads((done / "summary.json").read_text())
    shares = summary["step_shares"]
    assert set(shares) == {
        *("data_wait", "copy_to_device", "augmentation", "forward", "backward"),
        *("optimizer", "logging", "validation"),
    }
    assert sum(shares.values()) == pytest.approx(1)
    assert all(shares[phase] > 0 for phase in ("forward", "backward", "optimizer", "validation"))
    assert summary["data_wait_share"] == shares["data_wait"]
    assert 40 * 2 / summary["samples_per_second"] < summary["wall_seconds"]


def test_a_slow_loader_is_seen_as_waiting_for_data(dataset, tmp_path, monkeypatch):
    """By a clock that the loader moves by 0.3 s for a batch, and a step by 0.1 s."""
    clock.use_in_runs(monkeypatch)
    slow = ["augmentation._target_=helpers.clock.SlowAugment", "trainer.max_steps=8", clock.ticks(0.1)]
    summary = tiny.train(dataset, tmp_path / "run", *slow)
    assert summary["step_shares"]["data_wait"] == pytest.approx(0.75)
    assert summary["data_wait_share"] == pytest.approx(0.75)


def test_a_profile_has_the_named_parts_of_a_step(dataset, tmp_path):
    tiny.train(
        dataset, tmp_path / "run", "perf.profile=true", "trainer.max_steps=14", "data.samples_per_epoch=28"
    )
    (trace,) = (tmp_path / "run/tensorboard/trace").glob("*.pt.trace.json")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {f"medconv/{part}" for part in ("data_wait", "forward", "backward", "optimizer")} <= names


def test_running_out_of_memory_names_the_switches(dataset, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"does not fit into memory.*perf\.activation_checkpointing=pointwise.*data\.batch_size",
    ):
        tiny.train(dataset, tmp_path / "run", "+callbacks.full._target_=helpers.tiny.OutOfMemory")
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


def test_an_epoch_is_whole_optimizer_steps(dataset, tmp_path):
    """Lightning steps at the end of each epoch, however few batches are left (Lightning#19987, #21808)."""
    settings = ["data.samples_per_epoch=4", "trainer.accumulate_grad_batches=3", "trainer.max_steps=2"]
    tiny.train(dataset, tmp_path / "run", *settings)
    checkpoint = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["completed"]
    assert (checkpoint["global_step"], batches) == (2, 6)


def test_weights_of_a_checkpoint_are_the_start_of_another_run(done, dataset, tmp_path):
    settings = [
        f"init.pretrained={done / 'checkpoints/best.ckpt'}",
        "optimizer.lr=0",
        "data.samples_per_epoch=4",
    ]
    tiny.train(dataset, tmp_path / "run", *settings)
    first, last = (
        torch.load(p / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for p in (done, tmp_path / "run")
    )
    key = "network.head.weight"
    assert torch.equal(first[key], last[key])
    assert (
        torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 4
    )  # though no better


def test_sample_numbers_run_on_over_epochs(dataset, tmp_path):
    """Each epoch brings new samples; what sample n is does not depend on where an epoch ends."""
    settings = [
        "trainer.max_steps=8",
        "+callbacks.spy._target_=helpers.tiny.Spy",
        f"+callbacks.spy.path={tmp_path / 'seen.txt'}",
    ]
    tiny.train(dataset, tmp_path / "run", *settings, "data.samples_per_epoch=6")
    seen = [int(line) for line in (tmp_path / "seen.txt").read_text().split()]
    assert seen == list(range(16))


def test_checkpoints_hold_plain_values(done):
    content = torch.load(done / "checkpoints/last.ckpt", weights_only=True)
    assert content["medconv"]["config"]["model"]["_target_"] == "medconv.models.UNet"

    def plain(value):
        if isinstance(value, dict):
            return all(plain(v) for v in value.values())
        if isinstance(value, (list, tuple)):
            return all(plain(v) for v in value)
        return value is None or isinstance(value, (bool, int, float, str))

    assert plain(content["medconv"])
    assert all(math.isfinite(float(v.sum())) for v in content["state_dict"].values())
