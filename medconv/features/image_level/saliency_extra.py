"""What `medconv predict --saliency` adds: a Grad-CAM picture of each case."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Case
from medconv.features.image_level import saliency
from medconv.features.image_level.forward import ImageLevelForward, ImageLevelScores
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.features.pictures.drawing import png
from medconv.inference.extras import Extra
from medconv.utils.atomic_io import replacing


def of_options(_: argparse.Namespace) -> Saliency:
    return Saliency()


class Saliency(Extra):
    flag = "--saliency"
    per_voxel = False

    def settings(self) -> dict[str, Any]:
        return {"saliency": True}

    def write(
        self, folder: Path, predictor: Any, case: Case, scores: ImageLevelScores, answer: np.ndarray
    ) -> None:
        picture = png(overlay(predictor.forward, scores))
        path = folder / "saliency" / f"{case.id}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_bytes(picture)


def overlay(forward: ImageLevelForward, scores: ImageLevelScores) -> np.ndarray:
    """A Grad-CAM picture from the first network.

    It is for the highest class or label, or for the first number of a regression.
    Shape: (height, width, 3) uint8.
    """
    member = forward.members[0]
    assert isinstance(member.targets, ImageLevelTargets)
    target = member.targets.shown_output(scores.outputs)
    image = forward.images(member, [scores.case_input])[0]
    spacing_mm = member.preprocessing.spacing_mm
    if member.preprocessing.resize is not None:
        spacing_mm = scores.crop.spacing_mm(member.window.patch_size)
    return saliency.overlay(member.network, image, spacing_mm, target)
