"""medconv/training/tasks/segmentation.py: deep supervision in runs."""

from pathlib import Path

import torch
from helpers import tiny

from medconv.inference.load import load
from medconv.models.unet import UNet

DEEP = [
    "task.deep_supervision=true",
    "model.norm=instance",
    "model.channels=[4,6,8,8]",
    "model.strides=[2,2,2]",
    "data.patch_size=[16,16,16]",
]


def test_heads_are_trained_but_not_part_of_the_network(dataset: Path, tmp_path: Path) -> None:
    tiny.train(dataset, tmp_path / "run", *DEEP)
    content = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    heads = [key for key in content["state_dict"] if key.startswith("supervision.heads.")]
    assert heads == ["supervision.heads.0.weight", "supervision.heads.0.bias"]
    assert content["state_dict"][heads[1]].ne(0).all()  # trained: a bias begins at 0
    model = load(tmp_path / "run/checkpoints/last.ckpt")
    assert type(model.network) is UNet and not any("supervision" in key for key in model.network.state_dict())
    tiny.train(dataset, tmp_path / "plain", *DEEP, "task.deep_supervision=false")
    plain = torch.load(tmp_path / "plain/checkpoints/last.ckpt", weights_only=True)
    same = [
        key
        for key in plain["state_dict"]
        if torch.equal(plain["state_dict"][key], content["state_dict"][key])
    ]
    assert not [key for key in same if key.startswith("network.decoder")]  # it changes the training


def test_a_run_with_heads_resumes_exactly(dataset: Path, tmp_path: Path) -> None:
    short = [*DEEP, "data.samples_per_epoch=4", "scheduler=constant", "scheduler.warmup_steps=0"]
    tiny.train(dataset, tmp_path / "uninterrupted", *short, "trainer.max_epochs=4", "trainer.max_steps=-1")
    tiny.train(dataset, tmp_path / "half", *short, "trainer.max_epochs=2", "trainer.max_steps=-1")
    resumed = [*short, "trainer.max_epochs=4", "trainer.max_steps=-1"]
    tiny.train(
        dataset, tmp_path / "resumed", *resumed, f"run.resume={tmp_path / 'half/checkpoints/last.ckpt'}"
    )
    states = [
        torch.load(tmp_path / f"{name}/checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for name in ("uninterrupted", "resumed")
    ]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
