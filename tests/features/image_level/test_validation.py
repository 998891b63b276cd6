"""medconv/features/image_level/validation.py: what a validation returns and logs for each kind of targets."""

from itertools import product

import lightning as L
import numpy as np
import pytest
import torch
from helpers.small_images import CLASSES, FINDINGS, NUMBERS, STDS, Images, fit, task
from torch.utils.data import DataLoader, default_collate

from medconv.features.image_level import metrics as image_level
from medconv.features.image_level.mixup import Mixup
from medconv.features.image_level.targets import ImageLevelTargets


def rows_of(module):
    assert isinstance(module.targets, ImageLevelTargets)
    return module.targets.arrays(list(module.rows.values()))


@pytest.mark.parametrize("image_targets", [CLASSES, FINDINGS], ids=["multiclass", "multilabel"])
def test_classes_and_labels_are_learned(image_targets):
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
    checkpoint = {}
    module.on_save_checkpoint(checkpoint)
    assert checkpoint["medconv"] == {
        "of": "a test",
        "validation": module.rows,
        "temperature": module.temperature,
    }


def test_regression_learns_in_the_units_of_the_labels():
    module = task(NUMBERS)
    trainer = fit(module, 60)
    outputs, truth = rows_of(module)
    errors = np.abs(outputs - truth).mean(0)
    assert (errors < 0.5 * np.array(STDS)).all(), errors
    assert float(trainer.callback_metrics["val/mae"]) == pytest.approx(errors.mean(), rel=1e-4)


def test_validation_cross_entropy_is_that_of_the_outputs():
    module = task(FINDINGS)
    trainer = fit(module, 1)
    outputs, truth = rows_of(module)
    losses = -np.log(np.where(truth > 0, outputs, 1 - outputs))
    sides = [losses[truth[:, label] == side, label] for label in range(truth.shape[1]) for side in (0, 1)]
    expected = (losses.mean() + np.mean([side.mean() for side in sides if len(side)])) / 2
    assert float(trainer.callback_metrics["val/cross_entropy"]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("image_targets", [CLASSES, FINDINGS], ids=["multiclass", "multilabel"])
def test_answers_are_those_at_the_temperature_of_the_validation(image_targets):
    """An overconfident network, one of another scale: the same answers, at another temperature."""
    modules = [task(image_targets) for _ in range(2)]
    for module, scale in zip(modules, (1, 2), strict=True):
        fit(module, 6)
        with torch.no_grad():
            for weight in module.network.head.parameters():
                weight.mul_(scale)
        validation = DataLoader(Images(image_targets, 30, named=True), batch_size=8)
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        trainer.validate(module, validation, verbose=False)
        assert float(trainer.callback_metrics["val/temperature"]) == pytest.approx(module.temperature)
    less, more = modules
    assert 1.2 < less.temperature < 45
    assert more.temperature == pytest.approx(2 * less.temperature, rel=2e-2)
    assert rows_of(more)[0] == pytest.approx(rows_of(less)[0], abs=5e-3)
    images = default_collate([Images(image_targets, 30, named=True)[number]["image"] for number in range(30)])
    with torch.no_grad():
        logits = less.network.eval()(images)
    expected = image_targets.decode(logits / less.temperature).numpy()
    assert rows_of(less)[0] == pytest.approx(expected, abs=1e-4)


def test_a_validation_that_is_stopped_leaves_the_rows_of_the_last_one():
    module = task(CLASSES)
    fit(module, 6)
    rows = dict(module.rows)
    module.on_validation_epoch_start()
    cases = [Images(CLASSES, 30, named=True)[number] for number in range(8)]
    module.validation_step(default_collate(cases), 0)
    checkpoint = {}
    module.on_save_checkpoint(checkpoint)
    assert checkpoint["medconv"]["validation"] == rows and len(rows) == 30


def test_test_cases_are_answered_at_the_temperature_of_the_checkpoint():
    """Which is that of its validation cases, whatever the test cases are."""
    module = task(CLASSES)
    fit(module, 6)
    module.on_load_checkpoint({"medconv": {"temperature": 3.0}})
    cases = Images(CLASSES, 30, named=True)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.test(module, DataLoader(cases, batch_size=8), verbose=False)
    with torch.no_grad():
        logits = module.network.eval()(default_collate([cases[number]["image"] for number in range(30)]))
    assert rows_of(module)[0] == pytest.approx((logits / 3).softmax(-1).numpy(), abs=1e-5)


def test_mirroring_averages_probabilities():
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


def test_training_with_mixup_learns_and_gives_the_same_loss_again(tmp_path):
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
