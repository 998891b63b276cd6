"""Components are those of the whole label map."""

import numpy as np
from helpers.slabs import image, model, scores, thin_slabs  # noqa: F401 - a fixture of all tests

from medconv.features.postprocessing.extra import PostProcessing
from medconv.features.postprocessing.steps import Step, Steps
from medconv.inference.predictor import Predictor


def test_components_are_those_of_the_whole_label_map():
    """They cross the borders of slabs."""
    one = model(0, 1.4)
    steps = Steps((Step("keep_largest", "a"),), one.targets)
    array = image().voxels[0]
    plain = Predictor([one])(array, spacing_mm=(1, 1, 1))
    processed = Predictor([one], extras=[PostProcessing(steps)])(array, spacing_mm=(1, 1, 1))
    grid = scores([one], False).crop.grid
    np.testing.assert_array_equal(processed, steps.apply(plain, grid, one.targets))
    assert (processed != plain).any()
