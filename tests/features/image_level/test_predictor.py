"""The predictor with networks of whole images."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import loaded_models, members
from PIL import Image
from torch import nn

from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.inference.predictor import Predictor
from medconv.inference.prepare import from_array, prepare


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
