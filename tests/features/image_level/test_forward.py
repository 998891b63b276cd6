"""medconv/features/image_level/forward.py: means over flips and networks, in batches."""

import numpy as np
import pytest
import torch
from helpers import loaded_models
from helpers.members import refused
from PIL import Image
from torch import nn

from medconv.data.case import Case
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.inference.predictor import Predictor

CLASSES = MulticlassTargets(("a", "b"))


def model(seed=0, size=(8, 8), **more):
    """A linear network, which distinguishes an image from its mirror images."""
    torch.manual_seed(seed)
    linear = nn.Linear(size[0] * size[1], 2)
    linear.weight.data /= 100  # pixels are 0 to 255
    return loaded_models.image_level(nn.Sequential(nn.Flatten(), linear), CLASSES, size, **more)


def save(path, pixels):
    Image.fromarray(np.ascontiguousarray(pixels)).save(path)
    return path


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)


def test_mirror_axes_average_over_flipped_images(pixels, tmp_path):
    flipped = (pixels, pixels[::-1], pixels[:, ::-1], pixels[::-1, ::-1])
    paths = [save(tmp_path / f"{number}.png", image) for number, image in enumerate(flipped)]
    alone = Predictor([model()])
    outputs = [alone(path) for path in paths]
    predictor = Predictor([model(mirror_axes=(0, 1))])
    np.testing.assert_allclose(predictor(paths[0]), np.mean(outputs, 0), atol=1e-6)
    assert np.ptp(outputs, 0).max() > 1e-3


def test_members_are_averaged_and_batches_change_nothing(pixels, tmp_path):
    paths = [save(tmp_path / f"{number}.png", image) for number, image in enumerate((pixels, 255 - pixels))]
    predictor = Predictor([model(0), model(1)])
    inputs = [predictor.read(Case(path.name, (path,))) for path in paths]
    single = [Predictor([model(seed)])(path) for path in paths for seed in (0, 1)]
    expected = np.reshape(single, (2, 2, 2)).mean(1)
    np.testing.assert_allclose([scores.answer() for scores in predictor.scores(inputs)], expected, atol=1e-6)


def test_outputs_that_are_not_finite_are_an_error(pixels, tmp_path):
    broken = model()
    next(broken.network.parameters()).data.fill_(float("nan"))
    with refused(r"the network's outputs are not finite \(precision=32-true\)"):
        Predictor([broken])(save(tmp_path / "a.png", pixels))


def test_the_batch_follows_from_the_size_of_the_images():
    sizes = {(8, 8): 64, (512, 512): 8, (4096, 4096): 1}
    for size, batch in sizes.items():
        member = loaded_models.image_level(nn.Identity(), CLASSES, size)
        assert Predictor([member]).forward.batch_size == batch
        assert Predictor([member], batch_size=3).forward.batch_size == 3
    assert Predictor([loaded_models.segmentation(nn.Identity())], batch_size=3).forward.batch_size == 1
