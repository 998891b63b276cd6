"""From logits to answers; with trained networks in `test_predictor.py`."""

import numpy as np
import pytest
import torch
from helpers import loaded_models
from torch import nn

from medconv.inference.images import from_array
from medconv.inference.prepare import prepare
from medconv.inference.scores import LabelMapScores, with_cpu_fallback


def scores(logits: torch.Tensor, weights: tuple[float, ...] = (1.0,)) -> LabelMapScores:
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1))
    image = from_array(np.ones(logits.shape[-3:], np.float32), 3, spacing_mm=(1, 1, 1))
    crop = prepare(image, [model], [model.preprocessing]).crop
    return LabelMapScores([logits] * len(weights), list(weights), [crop] * len(weights), model.targets)


def test_the_label_is_the_class_of_the_highest_logit() -> None:
    logits = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    single = scores(logits)
    np.testing.assert_array_equal(single.answer(), logits.argmax(0).numpy())
    probabilities = np.stack(list(single.probabilities()))
    np.testing.assert_allclose(probabilities, logits.softmax(0).numpy(), atol=1e-6)
    averaged = scores(logits, (0.25, 0.75))
    np.testing.assert_array_equal(averaged.answer(), single.answer())


def test_the_cpu_takes_over_where_gpu_memory_runs_out() -> None:
    calls: list[LabelMapScores] = []

    def compute(given: LabelMapScores) -> int:
        calls.append(given)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 7

    assert with_cpu_fallback(scores(torch.zeros(2, 3, 3, 3)), compute) == 7
    assert [each.logits[0].device.type for each in calls] == ["cpu", "cpu"]
    with pytest.raises(ValueError, match="no"):
        with_cpu_fallback(calls[0], lambda _: (_ for _ in ()).throw(ValueError("no")))
