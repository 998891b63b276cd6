"""Whether a file says what its checkpoint says: the largest difference between their logits, in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from medconv.data.case import Case
from medconv.export.graph import Captured
from medconv.inference.image_level_predictor import ImageLevelPredictor
from medconv.inference.inputs import find_cases
from medconv.inference.load import LoadedModel
from medconv.inference.predictor import Predictor
from medconv.models.outputs import full_resolution


@torch.inference_mode()
def on_patches(reference: LoadedModel, exported: LoadedModel, captured: Captured) -> float:
    """Of random patches: one, three at once, and another size where sizes are open."""
    patch = reference.window.patch_size
    larger = [
        n + d if free else n for n, d, free in zip(patch, captured.divisor, captured.dynamic, strict=True)
    ]
    generator = torch.Generator().manual_seed(1)
    largest = torch.zeros(())
    for batch, size in ((1, patch), (3, patch), (1, larger)):
        image = torch.randn(batch, len(reference.modalities), *size, generator=generator)
        wanted = full_resolution(reference.network(image.contiguous(memory_format=reference.memory_format)))
        largest = torch.maximum(
            largest, (exported.network(image) - wanted).abs().max() / _unit(reference, wanted)
        )  # of nan, nan
    return float(largest)


def on_case(reference: LoadedModel, exported: LoadedModel, case: Path) -> tuple[float, tuple[int, ...]]:
    """Of a whole image, through preprocessing, windows and flips: the difference, and the image's prepared
    shape.

    Raises: ValueError: the file is no image that the network takes, or not the only one.
    """
    found = find_cases(case, len(reference.modalities))
    if len(found) != 1:
        raise ValueError(f"--case {case}: expected one case, found {len(found)}")
    if reference.image_targets is not None:
        return _of_whole(reference, exported, found[0])
    both = [Predictor([replace(member, precision="32-true")]) for member in (reference, exported)]
    read = both[0].read(found[0])
    wanted, got = (one.scores(read).logits[0] for one in both)
    return float((got - wanted).abs().max()), tuple(read.arrays[0].shape[1:])


def _of_whole(reference: LoadedModel, exported: LoadedModel, case: Case) -> tuple[float, tuple[int, ...]]:
    """Of probabilities, or numbers."""
    both = [ImageLevelPredictor([replace(member, precision="32-true")]) for member in (reference, exported)]
    read = both[0].read(case)
    wanted, got = (torch.from_numpy(one.predict_batch([read])) for one in both)
    return float((got - wanted).abs().max() / _unit(reference, wanted)), tuple(read.arrays[0].shape[1:])


def _unit(reference: LoadedModel, wanted: Tensor) -> Tensor:
    """What a difference is measured in: numbers may be thousands, of which fp32 knows seven digits."""
    numbers = reference.image_targets is not None and reference.image_targets.kind == "regression"
    return wanted.abs().max().clamp(min=1) if numbers else torch.ones(())
