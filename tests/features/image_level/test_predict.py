"""Predictions of many images by networks of whole images."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import loaded_models, members
from PIL import Image
from torch import Tensor, nn

from medconv.data.case import Case
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.saliency_extra import Saliency
from medconv.inference import predict
from medconv.inference.predictor import Predictor


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
