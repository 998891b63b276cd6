"""Compare an exported model with its checkpoint: the largest difference of their logits, in fp32."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from medconv.inference.load import LoadedModel
from medconv.inference.predictor import Predictor
from medconv.models.outputs import full_resolution
from medconv.performance.switches import to_memory_format
from medconv.utils.errors import ArgumentError


@torch.inference_mode()
def on_patches(reference: LoadedModel, exported: LoadedModel, larger: Sequence[int]) -> float:
    """The largest difference on random patches: one, a batch of three, and one of another size.

    Args:
        larger: that size; along axes that take no other, the patch's.
    """
    generator = torch.Generator().manual_seed(1)
    patch_size = reference.window.patch_size
    largest = torch.zeros(())
    channels = len(reference.modalities)
    shapes = [(1, channels, *patch_size), (3, channels, *patch_size), (1, channels, *larger)]
    for shape in shapes:
        image = torch.randn(shape, generator=generator)
        in_layout = to_memory_format(image, reference.memory_format)
        expected = full_resolution(reference.network(in_layout))
        difference = _relative_difference(exported.network(image), expected)
        # Keeps NaN, unlike max().
        largest = torch.maximum(largest, difference)
    return float(largest)


def on_case(reference: LoadedModel, exported: LoadedModel, case: Path) -> tuple[float, tuple[int, ...]]:
    """The largest difference on an image, through preprocessing, windows and flips.

    Args:
        case: an image, as `Predictor.find_cases` takes it.
    Returns:
        The difference, and the size of the preprocessed image in voxels.
    Raises:
        ArgumentError: several cases.
        ValueError: not an image that the network takes.
    """
    # An exported file computes in fp32, whatever precision the training had.
    of_reference = Predictor([replace(reference, precision="32-true")])
    cases = of_reference.find_cases(case, "case")
    if len(cases) != 1:
        raise ArgumentError("case", f" {case}: expected one case, found {len(cases)}")
    of_exported = Predictor([replace(exported, precision="32-true")])
    case_input = of_reference.read(cases[0])
    (expected,) = of_reference.scores([case_input], keeps_logits=True)
    (actual,) = of_exported.scores([case_input], keeps_logits=True)
    difference = _relative_difference(actual.values, expected.values)
    return float(difference), tuple(case_input.arrays[0].shape[1:])


def _relative_difference(actual: Tensor, expected: Tensor) -> Tensor:
    """The largest difference over the largest logit, if that is above 1.

    Logits of large networks reach 10, regression gives thousands, and fp32 has seven digits.
    """
    unit = expected.abs().max().clamp(min=1)
    return (actual - expected).abs().max() / unit
