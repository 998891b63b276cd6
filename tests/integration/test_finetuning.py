"""Runs that begin from a file: other classes, frozen layers and rates of their own, killed and continued,
on two processes.
"""

import os
import re

import pytest
import torch
from helpers import hub, resuming, tiny
from helpers.processes import Forked

from medconv.features.export.export import export
from medconv.features.export.job import ExportOptions
from medconv.inference.load import load
from medconv.utils import checkpoint_io
from medconv.utils.exit_codes import DONE

MORE = [
    "task.deep_supervision=true",
    "model.channels=[4,8,8,8]",
    "model.strides=[2,2,1]",
    "weight_averaging.begin=1",
    "weight_averaging.every=1",
    "data.patch_size=[16,16,16]",
]
TUNED = ["init.freeze=['^encoder']", "init.lr_multipliers={decoder:0.1,down:0.5}", "scheduler.warmup_steps=0"]


@pytest.fixture(scope="module")
def first(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "run"
    tiny.train(dataset, folder, *MORE)
    return folder / "checkpoints/last.ckpt"


def last(folder):
    return checkpoint_io.read(folder / "checkpoints/last.ckpt")


def rates(content):
    """Factor to learning rate."""
    return {group["lr_multiplier"]: group["lr"] for group in content["optimizer_states"][0]["param_groups"]}


def test_on_other_classes_with_frozen_layers_and_rates_of_their_own(first, dataset, tmp_path, caplog):
    regions = ["data.regions={both:[1,2]}", *MORE, *TUNED, f"init.pretrained={first}"]
    with caplog.at_level("INFO", logger="medconv"):
        tiny.train(dataset, tmp_path / "run", *regions)
    assert f"init.pretrained={first}: " in caplog.text
    assert (
        "2 randomly initialised (head.weight, head.bias); 4 of the file not used (network.head.weight, "
        "network.head.bias, " in caplog.text
    )
    assert (
        "init.freeze: 24 of 56 parameters" in caplog.text
        and "the statistics of 8 batch norms stay as they are" in caplog.text
    )
    before, after = checkpoint_io.read(first)["state_dict"], last(tmp_path / "run")
    for state in (after["state_dict"], after["current_model_state"]):
        for name, value in state.items():
            if name.startswith("network.") and "head" not in name:
                assert torch.equal(value, before[name]) == name.startswith("network.encoder"), name
    lrs = rates(after)
    assert lrs[0.1] == pytest.approx(0.1 * lrs[1.0]) and lrs[0.5] == pytest.approx(0.5 * lrs[1.0])
    assert load(tmp_path / "run/checkpoints/last.ckpt").class_names


def test_from_weights_of_the_hugging_face_hub(first, dataset, tmp_path, monkeypatch, caplog):
    export(first, tmp_path / "heart", ExportOptions("safetensors"))
    weights = tmp_path / "heart/model.safetensors"
    with (
        hub.serving(weights.read_bytes(), tmp_path / "cache", monkeypatch),
        caplog.at_level("INFO", logger="medconv"),
    ):
        tiny.train(dataset, tmp_path / "run", *MORE, f"init.pretrained={hub.SOURCE}", "trainer.max_steps=1")
    assert re.search(r"model\.safetensors: (\d+) of \1 tensors loaded", caplog.text)
    assert f"pretrained: {hub.SOURCE}" in (tmp_path / "run/config.yaml").read_text()


def test_the_log_holds_the_table(first, dataset, tmp_path):
    arguments = tiny.overrides(
        dataset, *MORE, "trainer.max_steps=1", f"init.pretrained={first}", "init.freeze=[encoder]"
    )
    code, output = Forked(*arguments, f"run.dir={tmp_path / 'run'}", cwd=tmp_path).wait()
    assert code == DONE, output
    assert "eval mode" not in output
    lines = [line for line in output.splitlines() if "init.pretrained" in line]
    assert len(lines) == 1 and "tensors loaded" in lines[0]
    text = (tmp_path / "run/train.log").read_text()
    assert (
        "  loaded    encoder.0.0.weight\n" in text
        and "  not used  supervision.heads.0.weight  no such name" in text
    )


def test_a_run_that_was_killed_keeps_them_and_needs_the_file_no_more(first, dataset, tmp_path):
    file = tmp_path / "weights.ckpt"
    file.write_bytes(first.read_bytes())
    settings = [*resuming.STEPS, *MORE, *TUNED, f"init.pretrained={file}", "trainer.max_steps=9"]
    resuming.train(dataset, tmp_path / "whole", settings)
    process = resuming.start(dataset, tmp_path / "run", [*settings, "+callbacks.beat.at=t5"])
    process.join()
    assert process.exitcode == resuming.KILLED
    assert last(tmp_path / "run")["global_step"] < 9
    file.unlink()
    resuming.train(dataset, tmp_path / "run", settings)
    resuming.assert_the_same_run(tmp_path / "whole", tmp_path / "run")
    assert set(rates(last(tmp_path / "run"))) == {0.1, 0.5, 1.0}


def test_a_run_goes_on_only_with_the_same_layers_frozen(first, dataset, tmp_path):
    keys = (("freeze", "[encoder]"), ("lr_multipliers", "{encoder:0.1}"))
    for key, value in keys:
        with pytest.raises(
            ValueError, match=rf"run\.resume={first}: was trained with init\.{key}=None, this run has"
        ):
            tiny.train(dataset, tmp_path / "run", *MORE, f"run.resume={first}", f"init.{key}={value}")


def test_into_another_number_of_channels_and_dimensions(dataset, tmp_path):
    """From slices to volumes, into planes that conv=acs keeps."""
    flat, solid = tmp_path / "flat", tmp_path / "solid"
    tiny.train(dataset, flat, "data.spatial_dims=2")
    path = flat / "checkpoints/last.ckpt"
    with pytest.raises(ValueError, match=r"init\.inflate_2d=inflate repeats its kernels"):
        tiny.train(dataset, solid, f"init.pretrained={path}", "data.spatial_dims=3")
    planes = [
        "conv=acs",
        "conv.init_from_weights=true",
        "init.inflate_2d=acs",
        "optimizer.lr=0",
        "init.freeze=[encoder]",
    ]
    tiny.train(dataset, solid, f"init.pretrained={path}", *planes)
    solid_state, flat_state = last(solid)["state_dict"], checkpoint_io.read(path)["state_dict"]
    coefficients = solid_state["network.encoder.0.0.parametrizations.weight.original"]
    torch.testing.assert_close(
        coefficients, flat_state["network.encoder.0.0.weight"].flatten(2).transpose(1, 2)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["trainer.strategy=fsdp", "weight_averaging=none"],
        ["init.thaw_at=0.9"],  # after more steps than the run has
    ],
)
def test_on_two_processes(first, dataset, tmp_path, more):
    arguments = tiny.overrides(dataset, *MORE, *TUNED, f"init.pretrained={first}", "trainer.devices=2", *more)
    without_mean = "weight_averaging=none" in more
    arguments = [a for a in arguments if not (without_mean and a.startswith("weight_averaging."))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = tiny.command("train.py", *arguments, f"run.dir={tmp_path / 'run'}", cwd=tmp_path, env=environment)
    assert done.returncode == DONE, done.stderr
    before, after = checkpoint_io.read(first)["state_dict"], last(tmp_path / "run")["state_dict"]
    for name, value in after.items():
        if name.startswith("network.") and "num_batches" not in name and "head" not in name:
            assert torch.equal(value, before[name]) == name.startswith("network.encoder"), name
