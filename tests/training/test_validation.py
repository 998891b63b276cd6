"""medconv/training/validation.py: what a validation returns and logs for each kind of image-level targets."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from helpers.restoring import restore
from helpers.small_images import CLASSES, FINDINGS, NUMBERS, STDS, Images, fit, task
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import DataLoader, default_collate

from medconv.data.case import Grid
from medconv.data.loading.patch_dataset import Opaque
from medconv.data.preprocessing import preprocess
from medconv.data.preprocessing.preprocess import CropInfo
from medconv.features.image_level import metrics as image_level
from medconv.features.image_level.mixup import Mixup
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.inference.sliding_window import SlidingWindow
from medconv.models.unet import UNet
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.training.task import Task
from medconv.training.validation import LabelMapValidation

CLASSES_OF_VOXELS = LabelMapTargets.of_classes(("background", "box", "hole"))
IGNORING = LabelMapTargets.of_classes(("background", "box", "hole"), ignore=9)
REGIONS = RegionTargets(("all", "core", "edge"), ((1, 2), (2,), (1,)), None, (1, 2, 1))


def as_it_is(shape: tuple[int, ...]) -> CropInfo:
    """Neither cropped nor resampled."""
    return CropInfo(Grid.of(shape, np.eye(4)), shape, tuple((0, voxels) for voxels in shape))


def test_a_compiled_network_is_compiled_once_for_training_and_once_for_all_windows() -> None:
    """Cases of 1, 2, 5 and 8 windows, in batches of 4."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    torch.manual_seed(0)
    network = UNet(3, 1, 2, (2, 4), (2,), norm="instance")
    window = SlidingWindow((8, 8, 8), overlap=0, batch_size=4)
    plain, compiled = (
        LabelMapValidation(window, LabelMapTargets(("box",), ((1,),)), whole_batches=whole_batches)
        for whole_batches in (False, True)
    )
    network.eval()
    batches = []
    for windows in (1, 2, 5, 8):
        shape = (8, 8, 8 * windows)
        image, label = torch.rand(1, 1, *shape), torch.zeros(1, 1, *shape, dtype=torch.uint8)
        batch = {"image": image, "label": label, "reference": label[0, 0], "case": str(windows)}
        batches.append({**batch, "crop_info": Opaque(as_it_is(shape))})
    expected = [plain(network, batch) for batch in batches]
    network.compile(backend=counter)
    network.train()(torch.rand(2, 1, 8, 8, 8)).sum().backward()
    network.eval()
    found = [compiled(network, batch) for batch in batches]
    assert counter.frame_count == 2
    for one, other in zip(found, expected, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-4)


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
    assert checkpoint["medconv"] == {
        "of": "a test",
        "validation": module.rows,
        "temperature": module.temperature,
    }


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


@pytest.mark.parametrize("image_targets", [CLASSES, FINDINGS], ids=["multiclass", "multilabel"])
def test_answers_are_those_at_the_temperature_of_the_validation(image_targets: ImageLevelTargets) -> None:
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


def test_a_validation_that_is_stopped_leaves_the_rows_of_the_last_one() -> None:
    module = task(CLASSES)
    fit(module, 6)
    rows = dict(module.rows)
    module.on_validation_epoch_start()
    cases = [Images(CLASSES, 30, named=True)[number] for number in range(8)]
    module.validation_step(default_collate(cases), 0)
    checkpoint: dict = {}
    module.on_save_checkpoint(checkpoint)
    assert checkpoint["medconv"]["validation"] == rows and len(rows) == 30


def test_test_cases_are_answered_at_the_temperature_of_the_checkpoint() -> None:
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


@pytest.mark.parametrize(
    "targets", [CLASSES_OF_VOXELS, IGNORING, REGIONS], ids=["classes", "ignore", "regions"]
)
@pytest.mark.parametrize("slice_axis", [None, 2])
@pytest.mark.parametrize("annotated", [None, (True, False, True)])
def test_slabs_give_what_all_logits_give(
    targets: SegmentationTargets,
    slice_axis: int | None,
    annotated: tuple[bool, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dice, loss and the label map on the prepared grid; some planes are between the slabs' own."""
    monkeypatch.setattr(preprocess, "_VOXELS", 2 * 9 * 8)
    native_shape = (9, 10, 8)
    crop_info = CropInfo(Grid.of((11, 12, 8), np.eye(4)), (11, 12, 8), ((1, 10), (2, 12), (0, 8)))
    rng = torch.Generator().manual_seed(0)
    image = torch.randn(1, 3, 14, 31, 12, generator=rng)
    label = torch.randint(3, (1, 1, 14, 31, 12), generator=rng, dtype=torch.uint8)
    label[label == 2] = 9 if targets.ignore else 2
    reference = torch.randint(3, (11, 12, 8), generator=rng, dtype=torch.uint8)
    patch = (8, 8) if slice_axis is not None else (8, 8, 8)
    window = SlidingWindow(patch, slice_axis=slice_axis)
    batch = {
        "case": "a",
        "image": image,
        "label": label,
        "reference": reference,
        "annotated": annotated,
        "crop_info": Opaque(crop_info),
    }
    validate = LabelMapValidation(window, targets)
    validated = validate(nn.Identity(), batch, keeps_prediction=True)
    logits = window(nn.Identity(), image)
    assert logits.shape == image.shape and native_shape == crop_info.content_shape
    native = restore(logits[0], crop_info, targets.decode)
    assert validated.rows == {"a": targets.dice(native, reference.numpy(), annotated)}
    assert validated.losses["a"] == pytest.approx(targets.cross_entropy(logits, label, annotated), rel=1e-5)
    torch.testing.assert_close(validated.predicted["prediction"], targets.decode(logits[0]))


def test_a_case_without_labelled_voxels_has_no_loss() -> None:
    label = torch.full((1, 1, 8, 8, 8), 9, dtype=torch.uint8)
    batch = {
        "case": "a",
        "image": torch.zeros(1, 3, 8, 8, 8),
        "label": label,
        "reference": label[0, 0],
        "crop_info": Opaque(as_it_is((8, 8, 8))),
    }
    validate = LabelMapValidation(SlidingWindow((8, 8, 8)), IGNORING)
    assert validate(nn.Identity(), batch).losses == {"a": None}


def test_a_slab_is_scored_on_the_cpu_if_the_gpu_has_no_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")]
    cross_entropy = LabelMapTargets.cross_entropy

    def failing(targets: LabelMapTargets, *arguments: object) -> float | None:
        for error in fails:
            fails.remove(error)
            raise error
        return cross_entropy(targets, *arguments)

    monkeypatch.setattr(LabelMapTargets, "cross_entropy", failing)
    targets = LabelMapTargets(("box",), ((1,),))
    validate = LabelMapValidation(SlidingWindow((8, 8, 8)), targets)
    image = torch.randn(1, 2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    label = image.argmax(1, keepdim=True).to(torch.uint8)
    batch = {
        "case": "a",
        "image": image,
        "label": label,
        "reference": label[0, 0],
        "crop_info": Opaque(as_it_is((8, 8, 8))),
    }
    validated = validate(nn.Identity(), batch)
    assert not fails and validated.rows == {"a": {"box": 1.0}}
    assert validated.losses == validate(nn.Identity(), batch).losses and validated.losses["a"] is not None


def test_outputs_that_are_not_finite_are_said_with_their_case(caplog: pytest.LogCaptureFixture) -> None:
    validate = LabelMapValidation(SlidingWindow((8, 8, 8)), LabelMapTargets(("box",), ((1,),)))
    image = torch.randn(1, 2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    label = image.argmax(1, keepdim=True).to(torch.uint8)
    validate(
        nn.Identity(),
        {
            "case": "a",
            "image": image,
            "label": label,
            "reference": label[0, 0],
            "crop_info": Opaque(as_it_is((8, 8, 8))),
        },
    )
    assert not caplog.records
    image[0, 0, 1, 2, 3] = torch.nan
    validate(
        nn.Identity(),
        {
            "case": "b",
            "image": image,
            "label": label,
            "reference": label[0, 0],
            "crop_info": Opaque(as_it_is((8, 8, 8))),
        },
    )
    assert "case b: the network's outputs are not finite, so its scores say nothing" in caplog.text


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
