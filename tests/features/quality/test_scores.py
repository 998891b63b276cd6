"""From logits to answers; with trained networks in `test_predictor.py`, by slabs in `test_slab_answer.py`."""

import numpy as np
import torch
from helpers import loaded_models
from torch import nn

from medconv.features.quality.extra import Quality, quality_of, uncertainty_of
from medconv.inference.predictor import LabelMapForward
from medconv.inference.prepare import from_array, prepare


def scores(image, networks=1):
    torch.manual_seed(0)
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1))
    models = [model] * networks
    named = from_array(image, 3, spacing_mm=(1, 1, 1))
    forward = LabelMapForward(models, "cpu", extras=[Quality()])
    with torch.inference_mode():
        return forward([prepare(named, models, forward.preprocessings)], keeps_logits=True)[0]


def test_the_label_is_the_class_of_the_highest_logit():
    image = np.random.default_rng(0).normal(1, 1, (4, 5, 6)).astype(np.float32)
    single = scores(image)
    (logits,) = single.logits
    assert logits.shape == (2, 4, 5, 6)
    np.testing.assert_array_equal(single.answer(), logits.argmax(0).numpy())
    probabilities = np.stack(list(single.probabilities()))
    np.testing.assert_allclose(probabilities, logits.softmax(0).numpy(), atol=1e-6)


def test_networks_that_agree_have_the_answer_of_one():
    image = np.random.default_rng(0).normal(1, 1, (4, 5, 6)).astype(np.float32)
    several = scores(image, networks=3)
    np.testing.assert_array_equal(several.answer(), scores(image).answer())
    (result,) = quality_of(several)["classes"].values()
    assert result["dice"] == 1 and quality_of(several)["networks"] == 3
    entropy = uncertainty_of(several)
    assert entropy.shape == (4, 5, 6) and entropy.min() > 0 and entropy.max() <= 1


def test_the_uncertainty_is_the_entropy_of_each_voxel():
    image = np.random.default_rng(0).normal(1, 1, (4, 5, 6)).astype(np.float32)
    single = scores(image)
    (logits,) = single.logits
    p = logits.double().softmax(0)
    entropy = -(p * p.log2()).sum(0).numpy()
    np.testing.assert_allclose(uncertainty_of(single), entropy, atol=1e-5)


def test_volumes_are_in_ml_of_the_image_s_own_voxels():
    image = np.random.default_rng(0).normal(1, 1, (4, 5, 6)).astype(np.float32)
    torch.manual_seed(0)
    for networks in (1, 2):
        models = [loaded_models.segmentation(nn.Conv3d(1, 2, 1))] * networks
        named = from_array(image, 3, spacing_mm=(1, 2, 5))
        forward = LabelMapForward(models, "cpu", extras=[Quality()])
        with torch.inference_mode():
            (case,) = forward([prepare(named, models, forward.preprocessings)], keeps_logits=True)
        (found,) = quality_of(case)["classes"].values()
        voxels = np.count_nonzero(case.answer())
        assert voxels and abs(found["volume_ml"] - voxels * 0.01) < 1e-9
