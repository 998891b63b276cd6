"""Image-level networks from files to outputs: means over flips and members, and images that do not fit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import loaded_models
from helpers.members import refused
from PIL import Image
from torch import nn

from medconv.data.case import Case
from medconv.inference.image_level_predictor import ImageLevelPredictor
from medconv.inference.load import LoadedModel
from medconv.targets.multiclass import MulticlassTargets

CLASSES = MulticlassTargets(("a", "b"))


def model(seed: int = 0, size: tuple[int, int] = (8, 8), **more) -> LoadedModel:
    """A linear network, which distinguishes an image from its mirror images."""
    torch.manual_seed(seed)
    linear = nn.Linear(size[0] * size[1], 2)
    linear.weight.data /= 100  # pixels are 0 to 255
    return loaded_models.image_level(nn.Sequential(nn.Flatten(), linear), CLASSES, size, **more)


def save(path: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(np.ascontiguousarray(pixels)).save(path)
    return path


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)


def test_mirror_axes_average_over_flipped_images(pixels: np.ndarray, tmp_path: Path) -> None:
    flipped = (pixels, pixels[::-1], pixels[:, ::-1], pixels[::-1, ::-1])
    paths = [save(tmp_path / f"{number}.png", image) for number, image in enumerate(flipped)]
    alone = ImageLevelPredictor([model()])
    outputs = [alone.predict(path) for path in paths]
    predictor = ImageLevelPredictor([model(mirror_axes=(0, 1))])
    np.testing.assert_allclose(predictor.predict(paths[0]), np.mean(outputs, 0), atol=1e-6)
    assert np.ptp(outputs, 0).max() > 1e-3


def test_members_are_averaged_and_batches_change_nothing(pixels: np.ndarray, tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{number}.png", image) for number, image in enumerate((pixels, 255 - pixels))]
    predictor = ImageLevelPredictor([model(0), model(1)])
    inputs = [predictor.read(Case(path.name, (path,))) for path in paths]
    single = [ImageLevelPredictor([model(seed)]).predict(path) for path in paths for seed in (0, 1)]
    expected = np.reshape(single, (2, 2, 2)).mean(1)
    np.testing.assert_allclose(predictor.predict_batch(inputs), expected, atol=1e-6)


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    """Training took one size, which was rounded up to a multiple of 4."""
    for size in (14, 20):
        save(tmp_path / f"{size}.png", np.full((size, size), 90, np.uint8))
    predictor = ImageLevelPredictor([model(size=(16, 16), rounding=(4, 4))])
    assert predictor.predict(tmp_path / "14.png").sum() == pytest.approx(1)
    with refused(r"20\.png: 20 x 20 pixels, the network was trained on .* and takes 16 x 16"):
        predictor.predict(tmp_path / "20.png")


def test_outputs_that_are_not_finite_are_an_error(pixels: np.ndarray, tmp_path: Path) -> None:
    broken = model()
    next(broken.network.parameters()).data.fill_(float("nan"))
    with refused(r"the network's outputs are not finite \(trainer\.precision=32-true\)"):
        ImageLevelPredictor([broken]).predict(save(tmp_path / "a.png", pixels))
