"""medconv/training/validation.py: what a validation returns and logs for each kind of image-level targets."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small_images import CLASSES, FINDINGS, NUMBERS, STDS, Images, fit, task
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import default_collate

from medconv.data.loading.datamodule import DataModule
from medconv.inference.sliding_window import SlidingWindow
from medconv.metrics import image_level
from medconv.models.unet import UNet
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.label_map import LabelMapTargets
from medconv.training.mixup import Mixup
from medconv.training.task import Task
from medconv.training.validation import LabelMapValidation
from medconv.utils.device_copy import DeviceCopies


def test_a_compiled_network_is_compiled_once_for_training_and_once_for_all_windows() -> None:
    """Cases of 1, 2, 5 and 8 windows, in batches of 4."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    torch.manual_seed(0)
    network = UNet(3, 1, 2, (2, 4), (2,), norm="instance")
    window = SlidingWindow((8, 8, 8), overlap=0, batch_size=4)
    plain, compiled = (
        LabelMapValidation(
            window,
            LabelMapTargets(("box",), ((1,),)),
            lambda logits, case: logits.argmax(0).byte().numpy(),
            whole_batches=whole_batches,
        )
        for whole_batches in (False, True)
    )
    network.eval()
    batches = []
    for windows in (1, 2, 5, 8):
        shape = (8, 8, 8 * windows)
        image, label = torch.rand(1, 1, *shape), torch.zeros(1, 1, *shape, dtype=torch.uint8)
        batches.append({"image": image, "label": label, "reference": label[0, 0], "case": str(windows)})
    expected = [plain(network, batch) for batch in batches]
    network.compile(backend=counter)
    network.train()(torch.rand(2, 1, 8, 8, 8)).sum().backward()
    network.eval()
    found = [compiled(network, batch) for batch in batches]
    assert counter.frame_count == 2
    for one, other in zip(found, expected, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-4)


def test_logits_that_did_not_fit_on_the_gpu_are_scored_on_the_cpu() -> None:
    """The window then gives them on the CPU; the image, as it is left by the copy, is on the device."""
    logits = torch.randn(1, 2, 4, 4, 4)
    label = torch.zeros(1, 1, 4, 4, 4, dtype=torch.uint8)
    case = {"image": torch.rand(1, 1, 4, 4, 4), "label": label, "reference": label[0, 0], "case": "a"}
    data = DataModule.__new__(DataModule)  # the copy alone
    data._copies = DeviceCopies()
    batch = data.transfer_batch_to_device(case, torch.device("meta"), 0)
    window: Any = lambda network, image: logits  # noqa: E731
    validation = LabelMapValidation(
        window,
        LabelMapTargets(("box",), ((1,),)),
        lambda logits, case: logits.argmax(0).byte().numpy(),
    )
    assert batch["image"].is_meta
    expected = torch.nn.functional.cross_entropy(logits, label[:, 0].long())
    assert validation(nn.Identity(), batch).losses == {"a": pytest.approx(float(expected))}


def rows_of(module: Task) -> tuple[np.ndarray, np.ndarray]:
    assert isinstance(module.targets, ImageLevelTargets)
    return module.targets.arrays(list(module.rows.values()))


@pytest.mark.parametrize("image_targets", [CLASSES, FINDINGS], ids=["multiclass", "multilabel"])
def test_classes_and_labels_are_learned(image_targets: ImageLevelTargets) -> None:
    module = task(image_targets)
    trainer = fit(module, 40)
    scores = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert scores["val/auc"] > 0.95 and scores["val/accuracy"] > 0.8 and scores["val/cross_entropy"] < 0.5
    assert list(module.rows) == [f"case{number:03}" for number in range(30)]
    for number, row in enumerate(module.rows.values()):
        assert row["values"] == Images(image_targets, 30, named=True)[number]["label"].tolist()
        assert len(row["outputs"]) == image_targets.num_outputs and all(0 <= p <= 1 for p in row["outputs"])
    outputs, truth = rows_of(module)
    assert image_level.measure(image_targets, outputs, truth)["auc"] == pytest.approx(scores["val/auc"])
    checkpoint: dict = {}
    module.on_save_checkpoint(checkpoint)
    assert checkpoint["medconv"] == {"of": "a test", "validation": module.rows}


def test_regression_learns_in_the_units_of_the_labels() -> None:
    module = task(NUMBERS)
    trainer = fit(module, 60)
    outputs, truth = rows_of(module)
    errors = np.abs(outputs - truth).mean(0)
    assert (errors < 0.5 * np.array(STDS)).all(), errors
    assert float(trainer.callback_metrics["val/mae"]) == pytest.approx(errors.mean(), rel=1e-4)


def test_validation_cross_entropy_is_that_of_the_outputs() -> None:
    module = task(FINDINGS)
    trainer = fit(module, 1)
    outputs, truth = rows_of(module)
    losses = -np.log(np.where(truth > 0, outputs, 1 - outputs))
    sides = [losses[truth[:, label] == side, label] for label in range(truth.shape[1]) for side in (0, 1)]
    expected = (losses.mean() + np.mean([side.mean() for side in sides if len(side)])) / 2
    assert float(trainer.callback_metrics["val/cross_entropy"]) == pytest.approx(expected, rel=1e-4)


def test_a_case_is_scored_on_the_cpu_if_the_gpu_has_no_memory_left() -> None:
    fails = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")]

    def to_native(logits: torch.Tensor, case: str) -> np.ndarray:
        for error in fails:
            fails.remove(error)
            raise error
        return logits.argmax(0).numpy()

    validate = LabelMapValidation(SlidingWindow((8, 8, 8)), LabelMapTargets(("box",), ((1,),)), to_native)
    image = torch.randn(1, 2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    label = image.argmax(1, keepdim=True).to(torch.uint8)
    batch = {"case": "a", "image": image, "label": label, "reference": label[0, 0]}
    validated = validate(nn.Identity(), batch)
    assert not fails and validated.rows == {"a": {"box": 1.0}}
    assert validated.losses == validate(nn.Identity(), batch).losses and validated.losses["a"] is not None


def test_mirroring_averages_probabilities() -> None:
    module = task(FINDINGS, mirror_axes=(0, 1)).eval()
    batch = default_collate([Images(FINDINGS, 5, named=True)[i] for i in range(5)])
    with torch.no_grad():
        outputs = module.validation_step(batch, 0)["outputs"]
        flipped = []
        for down, across in product((False, True), repeat=2):
            image = batch["image"].flip(2) if down else batch["image"]
            flipped.append(module.network(image.flip(3) if across else image).sigmoid())
    torch.testing.assert_close(outputs, sum(flipped) / 4)
    assert outputs.shape == (5, 2)


def test_training_with_mixup_learns_and_gives_the_same_loss_again(tmp_path: Path) -> None:
    module = task(CLASSES, mixup=Mixup(0.3, 4))
    batch = default_collate([Images(CLASSES, 8, named=False)[i] for i in range(8)])
    with torch.no_grad():
        first, again = (
            module.eval().loss_of(batch),
            module.loss_of({**batch, "sample": batch["sample"].tolist()}),
        )
        plain = task(CLASSES).eval().loss_of(batch)
    assert first == again and first != plain
    assert float(fit(module.train(), 40, home=tmp_path).callback_metrics["val/auc"]) > 0.95
