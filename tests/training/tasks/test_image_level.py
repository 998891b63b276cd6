"""Image-level tasks learn each target type and report a prediction for each case."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.small_images import CLASSES, FINDINGS, MEANS, NUMBERS, STDS, Images, fit, task
from torch.utils.data import default_collate

from medconv.metrics import image_level
from medconv.targets.image_level import ImageLevelTargets
from medconv.training.losses.image_level import CrossEntropy, ImageLevelLoss
from medconv.training.tasks.image_level import Classification, Regression, arrays
from medconv.training.tasks.mixup import Mixup


@pytest.mark.parametrize("image_targets", [CLASSES, FINDINGS], ids=["multiclass", "multilabel"])
def test_classes_and_findings_are_learned(image_targets: ImageLevelTargets) -> None:
    module = task(image_targets)
    trainer = fit(module, 40)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert found["val/auc"] > 0.95 and found["val/accuracy"] > 0.8 and found["val/cross_entropy"] < 0.5
    assert list(module.rows) == [f"case{number:03}" for number in range(30)]
    for number, row in enumerate(module.rows.values()):
        assert row["values"] == Images(image_targets, 30, named=True)[number]["label"].tolist()
        assert len(row["outputs"]) == image_targets.num_outputs and all(0 <= p <= 1 for p in row["outputs"])
    outputs, truth = arrays(module.rows)
    assert image_level.measure(image_targets, outputs, truth)["auc"] == pytest.approx(found["val/auc"])
    checkpoint: dict = {}
    module.on_save_checkpoint(checkpoint)
    assert checkpoint["medconv"] == {"of": "a test", "validation": module.rows}


def test_numbers_are_learned_in_their_own_units() -> None:
    module = task(NUMBERS)
    trainer = fit(module, 60)
    outputs, truth = arrays(module.rows)
    off = np.abs(outputs - truth).mean(0)
    assert (off < 0.5 * np.array(STDS)).all(), off
    assert float(trainer.callback_metrics["val/mae"]) == pytest.approx(off.mean(), rel=1e-4)


def test_cross_entropy_in_validation_is_that_of_the_outputs() -> None:
    module = task(FINDINGS)
    trainer = fit(module, 1)
    outputs, truth = arrays(module.rows)
    wanted = np.mean(
        [-np.log(p if t else 1 - p) for p, t in zip(outputs.ravel(), truth.ravel(), strict=True)]
    )
    assert float(trainer.callback_metrics["val/cross_entropy"]) == pytest.approx(wanted, rel=1e-4)


def test_mirroring_averages_what_the_outputs_mean() -> None:
    module = task(FINDINGS, mirror_axes=(0, 1)).eval()
    batch = default_collate([Images(FINDINGS, 5, named=True)[i] for i in range(5)])
    with torch.no_grad():
        found = module.validation_step(batch, 0)["outputs"]
        wanted = []
        for down, across in product((False, True), repeat=2):
            image = batch["image"].flip(2) if down else batch["image"]
            wanted.append(module.network(image.flip(3) if across else image).sigmoid())
    torch.testing.assert_close(found, sum(wanted) / 4)
    assert found.shape == (5, 2)


def test_a_task_of_another_kind_is_refused() -> None:
    for kind, image_targets in ((Regression, CLASSES), (Classification, NUMBERS)):
        with pytest.raises(ValueError, match=f"{kind.__name__} is for .*, got {image_targets.kind}"):
            loss = ImageLevelLoss(
                torch.nn.MSELoss() if image_targets is NUMBERS else CrossEntropy(), image_targets, MEANS, STDS
            )
            kind(torch.nn.Identity(), loss, None, None, image_targets, 2, record={})


def batch_of(numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.stack([torch.full((1, 4, 4), float(n)) for n in numbers])
    return images, torch.tensor([[float(n), 1.0] for n in numbers])


def test_mixup_is_a_function_of_seed_and_sample_numbers() -> None:
    numbers, order = [7, 3, 12, 100, 5], [2, 0, 4, 1, 3]
    image, target = Mixup(0.4, 1)(*batch_of(numbers), numbers)
    again = [numbers[i] for i in order]
    image2, target2 = Mixup(0.4, 1)(*batch_of(again), again)
    torch.testing.assert_close(image2, image[order])
    torch.testing.assert_close(target2, target[order])
    other, _ = Mixup(0.4, 2)(*batch_of(numbers), numbers)
    assert not torch.allclose(other, image)


def test_mixup_mixes_image_and_target_alike() -> None:
    numbers = list(range(40, 72))
    image, target = batch_of(numbers)
    mixed, of = Mixup(1.0, 0)(image, target, numbers)
    torch.testing.assert_close(mixed.mean((1, 2, 3)), of[:, 0])
    torch.testing.assert_close(of[:, 1], torch.ones(32))
    shares, partners = Mixup(1.0, 0).draw(numbers)
    assert sorted(partners) == list(range(32)) and not (partners == np.arange(32)).any()
    wanted = [s * n + (1 - s) * numbers[p] for s, n, p in zip(shares, numbers, partners, strict=True)]
    np.testing.assert_allclose(of[:, 0], wanted, rtol=1e-5)
    assert 0.35 < shares.mean() < 0.65 and shares.min() < 0.2 and shares.max() > 0.8


def test_no_mixup_changes_nothing_and_a_wrong_one_is_refused() -> None:
    image, target = batch_of([1, 2])
    assert Mixup(0, 0)(image, target, [1, 2]) == (image, target)
    for alpha in (-1, float("nan"), "0.2", True):
        with pytest.raises(ValueError, match=r"task.mixup must be a number of 0 or more"):
            Mixup(alpha, 0)


def test_training_with_mixup_learns_and_gives_the_same_loss_again(tmp_path: Path) -> None:
    module = task(CLASSES, mixup=0.3, seed=4)
    batch = default_collate([Images(CLASSES, 8, named=False)[i] for i in range(8)])
    with torch.no_grad():
        first, again = (
            module.eval().loss_of(batch),
            module.loss_of({**batch, "sample": batch["sample"].tolist()}),
        )
        plain = task(CLASSES).eval().loss_of(batch)
    assert first == again and first != plain
    assert float(fit(module.train(), 40, home=tmp_path).callback_metrics["val/auc"]) > 0.95
