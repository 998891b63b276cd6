"""Compare an exported model with its checkpoint: the largest difference of their logits, in fp32, relative to
the largest logit where that is above 1.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from medconv.export.graph import Captured
from medconv.inference.inputs import find_cases
from medconv.inference.load import LoadedModel
from medconv.inference.predictor import Predictor
from medconv.models.outputs import full_resolution


@torch.inference_mode()
def on_patches(reference: LoadedModel, exported: LoadedModel, captured: Captured) -> float:
    """The largest difference on random patches: one, a batch of three, and one of another size along dynamic
    axes.
    """
    patch = reference.window.patch_size
    generator = torch.Generator().manual_seed(1)
    largest = torch.zeros(())
    for batch, size in ((1, patch), (3, patch), (1, captured.larger)):
        image = torch.randn(batch, len(reference.modalities), *size, generator=generator)
        expected = full_resolution(reference.network(image.contiguous(memory_format=reference.memory_format)))
        difference = (exported.network(image) - expected).abs().max() / _unit(expected)
        largest = torch.maximum(largest, difference)  # keeps NaN, unlike max()
    return float(largest)


def on_case(reference: LoadedModel, exported: LoadedModel, case: Path) -> tuple[float, tuple[int, ...]]:
    """The largest difference on an image, through preprocessing, windows and flips; and its preprocessed
    shape.

    Raises: ValueError: not an image that the network takes, or several cases.
    """
    cases = find_cases(case, len(reference.modalities))
    if len(cases) != 1:
        raise ValueError(f"--case {case}: expected one case, found {len(cases)}")
    predictors = [Predictor([replace(member, precision="32-true")]) for member in (reference, exported)]
    case_input = predictors[0].read(cases[0])
    expected, actual = (predictor.scores([case_input])[0].values for predictor in predictors)
    difference = (actual - expected).abs().max() / _unit(expected)
    return float(difference), tuple(case_input.arrays[0].shape[1:])


def _unit(expected: Tensor) -> Tensor:
    """What differences are divided by: logits of large networks reach 10, regression gives thousands, and
    fp32 has seven digits.
    """
    return expected.abs().max().clamp(min=1)
