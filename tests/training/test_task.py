"""medconv/training/task.py: which parameters are optimised, how gradients are clipped and watched."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from helpers import tiny
from torch import Tensor, nn

from medconv.data.loading.patch import Batch
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.validation import ImageLevelValidation
from medconv.inference.load import load
from medconv.models.unet import UNet
from medconv.targets.label_map import LabelMapTargets
from medconv.training.callbacks.nonfinite_guard import NonfiniteGuard
from medconv.training.losses.fit import FittedLoss
from medconv.training.losses.segmentation import DiceCrossEntropy
from medconv.training.task import Task, _with_nan_gradient_if_bad, gather


class Mean(Task):
    """The loss is the mean of the outputs, times the batch's factor."""

    def loss_of(self, batch: Batch) -> Tensor:
        return self(batch["image"]).mean() * batch["factor"]


def make():
    network = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1))
    network[1].requires_grad_(False)
    sgd, epochs = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    targets = MulticlassTargets(("a", "b"))
    task = Mean(network, nn.Identity(), sgd, epochs, targets, ImageLevelValidation(targets, ()), record={})
    task.trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    return task


def test_only_trainable_parameters_are_optimised_and_torchs_schedules_count_epochs():
    task = make()
    configured = task.configure_optimizers()
    (group,) = configured["optimizer"].param_groups
    assert group["params"] == [task.network[0].weight]
    assert configured["lr_scheduler"]["interval"] == "epoch"


class Norms(NonfiniteGuard):
    """Keeps the norms that the task reports."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.norms = []

    def on_gradient_norm(self, norm: Tensor, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(float(norm))


@pytest.mark.parametrize(
    ("clip", "algorithm", "expected"),
    [
        (None, None, [3.0, 4.0]),
        (1.0, None, [0.6, 0.8]),
        (1.0, "norm", [0.6, 0.8]),
        (3.5, "value", [3.0, 3.5]),
    ],
)
def test_gradients_are_clipped_after_their_norm_is_known(tmp_path, clip, algorithm, expected):
    task = make()
    optimizer = task.configure_optimizers()["optimizer"]
    weight, watch = task.network[0].weight, Norms(tmp_path)
    weight.grad = torch.tensor([[3.0, 4.0]])
    task.trainer.callbacks = [watch]
    task.configure_gradient_clipping(optimizer, clip, algorithm)
    assert weight.grad[0].tolist() == pytest.approx(expected, rel=1e-4) and watch.norms == [5.0]


class Strides(nn.Module):
    """Notes the strides of its last input."""

    def forward(self, image: Tensor) -> Tensor:
        self.seen = image.stride()
        return image


@pytest.mark.parametrize("channels", [1, 4])
def test_the_network_gets_images_in_its_memory_format(channels):
    task = make()
    task.network = Strides()
    task.memory_format = torch.channels_last_3d
    task(torch.rand(2, channels, 4, 4, 4))
    assert task.network.seen == (64 * channels, 1, 16 * channels, 4 * channels, channels)


def test_a_loss_that_is_not_finite_makes_all_gradients_nan():
    task, image = make(), torch.ones(3, 2)
    task.trainer = None  # nothing is logged
    for factor, finite in ((1.0, True), (torch.inf, False)):
        task.zero_grad()
        task.training_step({"image": image, "factor": factor}, 0).backward()
        gradient = task.network[0].weight.grad
        assert bool(gradient.isfinite().all()) == finite and bool(gradient.isnan().all()) != finite


def test_anomalies_are_named_by_the_operation_of_the_network():
    """Not by ours, which makes all gradients NaN where the loss is not finite."""
    image = torch.full((2,), -1.0, requires_grad=True)
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan"),
        pytest.warns(UserWarning, match="SqrtBackward0"),
    ):
        _with_nan_gradient_if_bad(image.sqrt().sum()).backward()


def test_the_loss_of_a_batch_knows_what_its_cases_annotate():
    targets, network = LabelMapTargets.of_classes(["background", "a", "b"]), nn.Conv2d(1, 3, 1)
    loss = FittedLoss(DiceCrossEntropy(), targets, 2)
    task = Task(network, loss, *[make().make_optimizer] * 2, targets, make().validation, record={})
    image, label = torch.randn(2, 1, 4, 4), torch.arange(32).reshape(2, 1, 4, 4) % 3
    batch, known = {"image": image, "label": label}, torch.tensor([[True] * 3, [True, False, True]])
    whole, partial_ = task.loss_of(batch), task.loss_of({**batch, "annotated": known})
    torch.testing.assert_close(whole, loss(network(image), label))
    torch.testing.assert_close(partial_, loss(network(image), label, annotated=known))
    assert abs(float(whole - partial_)) > 1e-3


def test_entries_are_gathered_by_key():
    assert list(gather({"b": 1, "a": 2}).items()) == [("a", 2), ("b", 1)]


DEEP = [
    "task.deep_supervision=true",
    "model.norm=instance",
    "model.channels=[4,6,8,8]",
    "model.strides=[2,2,2]",
    "data.patch_size=[16,16,16]",
]


def test_heads_are_trained_but_not_part_of_the_network(dataset, tmp_path):
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


def test_a_run_with_heads_resumes_exactly(dataset, tmp_path):
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
