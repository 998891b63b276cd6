"""A table row for each case: a case that fails does not stop the others."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import loaded_models
from helpers.members import refused
from PIL import Image
from torch import Tensor, nn

from medconv.data.case import Case
from medconv.inference.image_level_predictor import ImageLevelPredictor
from medconv.inference.predict_image_level import predict_image_level
from medconv.inference.predictor import Input
from medconv.targets.multiclass import MulticlassTargets


class Brightness(nn.Module):
    """Two classes by mean brightness; runs out of memory on a batch with a white image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        if (images == 255).all((1, 2, 3)).any():
            raise torch.OutOfMemoryError("no room")
        return self.conv(images / 255).flatten(2).mean(2)


class FailingOverlay(ImageLevelPredictor):
    """Runs out of memory in one picture."""

    def overlay(self, case_input: Input, outputs: np.ndarray) -> np.ndarray:
        if case_input.case.id == "1":
            raise torch.OutOfMemoryError("no room")
        return super().overlay(case_input, outputs)


def cases(folder: Path, *brightness: int) -> list[Case]:
    paths = [folder / f"{number}.png" for number in range(len(brightness))]
    for path, value in zip(paths, brightness, strict=True):
        Image.fromarray(np.full((8, 8), value, np.uint8)).save(path)
    return [Case(path.stem, (path,)) for path in paths]


def rows(folder: Path) -> list[str]:
    with (folder / "predictions.csv").open(newline="") as file:
        return [row["case"] for row in csv.DictReader(file)]


@pytest.fixture
def model():
    return loaded_models.image_level(Brightness(), MulticlassTargets(("dark", "bright")))


def test_a_picture_that_fails_fails_only_its_case(model, tmp_path: Path) -> None:
    listed = cases(tmp_path, 10, 20, 30)
    with refused("1 of 3 cases could not be predicted\n  case 1: out of memory"):
        predict_image_level(FailingOverlay([model]), listed, tmp_path / "out", {}, {}, saliency=True)
    assert rows(tmp_path / "out") == ["0", "2"]
    assert {path.name for path in (tmp_path / "out/saliency").iterdir()} == {"0.png", "2.png"}


def test_a_batch_that_fails_is_predicted_one_by_one(model, tmp_path: Path) -> None:
    listed = cases(tmp_path, 10, 255, 30)
    with refused("1 of 3 cases could not be predicted\n  case 1: out of memory"):
        predict_image_level(ImageLevelPredictor([model], batch_size=3), listed, tmp_path / "out", {}, {})
    assert rows(tmp_path / "out") == ["0", "2"]
