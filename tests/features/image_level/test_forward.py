"""Predictions of whole images: means over flips and networks, sizes, and cases that fail."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import loaded_models, members
from helpers.members import refused
from PIL import Image
from torch import Tensor, nn

from medconv.data.case import Case
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.saliency_extra import Saliency
from medconv.inference import predict
from medconv.inference.predictor import Predictor
from medconv.inference.prepare import from_array, prepare

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


def test_images_of_another_size_are_refused(tmp_path):
    """Training took one size, which was rounded up to a multiple of 4."""
    for size in (14, 20):
        Image.fromarray(np.full((size, size), 90, np.uint8)).save(tmp_path / f"{size}.png")
    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 2))
    model = loaded_models.image_level(network, MulticlassTargets(("a", "b")), (16, 16), rounding=(4, 4))
    predictor = Predictor([model])
    assert predictor(tmp_path / "14.png").sum() == pytest.approx(1)
    with members.refused(r"20\.png: 20 x 20 pixels, the network was trained on .* and takes up to 16 x 16"):
        predictor(tmp_path / "20.png")
    coarser = replace(model, preprocessing=replace(model.preprocessing, spacing_mm=(2.0, 2.0)))
    with members.refused(r"20\.png: 20 x 20 pixels, .* and takes up to 32 x 32"):
        Predictor([coarser])(tmp_path / "20.png")


def test_whole_images_are_arrays_too_and_have_no_label_map():
    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 2))
    predictor = Predictor([loaded_models.image_level(network, MulticlassTargets(("a", "b")), (16, 16))])
    pixels = np.full((16, 16), 90, np.uint8)
    assert predictor(pixels, spacing_mm=(1, 1)).sum() == pytest.approx(1)
    with members.refused("^label maps are needed; these networks give another answer"):
        predictor.label_and_probabilities(pixels, spacing_mm=(1, 1))


@pytest.mark.parametrize(("edge", "is_cut"), [(8, False), (10, False), (11, True), (80, True)])
def test_a_picture_of_which_the_network_sees_only_the_middle_causes_a_warning(edge, is_cut):
    model = loaded_models.image_level(nn.Identity(), MulticlassTargets(("a", "b")), (8, 8))
    image = from_array(np.ones((edge, 8), np.float32), 2, spacing_mm=(1, 1))
    warning = prepare(image, [model], [model.preprocessing]).warning
    text = f"the network sees only its middle, 8 x 8 of {edge} x 8 voxels on the network's grid"
    assert (text in str(warning)) == is_cut


class Brightness(nn.Module):
    """Two classes by mean brightness; runs out of memory on a batch with a white image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        if (images == 255).all((1, 2, 3)).any():
            raise torch.OutOfMemoryError("no room")
        return self.conv(images / 255).flatten(2).mean(2)


class FailingSaliency(Saliency):
    """Runs out of memory in one picture."""

    def write(self, folder: Path, predictor: Any, case: Case, *rest: Any) -> None:
        if case.id == "1":
            raise torch.OutOfMemoryError("no room")
        super().write(folder, predictor, case, *rest)


def pictures(folder, *brightness):
    paths = [folder / f"{number}.png" for number in range(len(brightness))]
    for path, value in zip(paths, brightness, strict=True):
        Image.fromarray(np.full((8, 8), value, np.uint8)).save(path)
    return [Case(path.stem, (path,)) for path in paths]


def by_brightness(batch_size=None):
    model = loaded_models.image_level(Brightness(), MulticlassTargets(("dark", "bright")))
    return Predictor([model], batch_size=batch_size)


def rows(folder):
    lines = (folder / "predictions.csv").read_text().splitlines()
    return [line.partition(",")[0] for line in lines[1:]]


def test_a_picture_that_fails_fails_only_its_case(tmp_path):
    listed = pictures(tmp_path, 10, 20, 30)
    predictor = Predictor(by_brightness().members, extras=[FailingSaliency()])
    output = predict.output_in(tmp_path / "out", predictor)
    with members.refused("1 of 3 cases could not be predicted\n  case 1: out of memory"):
        predict.predict(predictor, listed, output)
    assert rows(tmp_path / "out") == ["0", "2"]
    assert {path.name for path in (tmp_path / "out/saliency").iterdir()} == {"0.png", "2.png"}


def test_a_batch_that_fails_is_predicted_one_by_one(tmp_path):
    predictor, listed = by_brightness(batch_size=3), pictures(tmp_path, 10, 255, 30)
    with members.refused("1 of 3 cases could not be predicted\n  case 1: out of memory"):
        predict.predict(predictor, listed, predict.output_in(tmp_path / "out", predictor))
    assert rows(tmp_path / "out") == ["0", "2"]


class Replacing(Brightness):
    """Another program replaces an image while it is predicted."""

    file = Path()

    def forward(self, images: Tensor) -> Tensor:
        Image.fromarray(np.full((9, 9), 30, np.uint8)).save(self.file)
        return super().forward(images)


def test_a_file_that_is_replaced_meanwhile_fails_its_case(tmp_path):
    """Else the result of one image would get the grid of another."""
    listed = pictures(tmp_path, 10, 20)
    network = Replacing()
    network.file = listed[1].images[0]
    model = loaded_models.image_level(network, MulticlassTargets(("dark", "bright")))
    predictor = Predictor([model], batch_size=2)
    with members.refused(rf"case 1: {network.file}: was replaced or removed while it was predicted"):
        predict.predict(predictor, listed, predict.output_in(tmp_path / "out", predictor))
    assert rows(tmp_path / "out") == ["0"]
