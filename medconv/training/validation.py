"""What a validation does with a batch of cases: label maps by sliding windows, whole images at once."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from medconv.data.loading.datamodule import Batch
from medconv.inference.sliding_window import SlidingWindow
from medconv.inference.tta import mean_over_flips
from medconv.models.outputs import full_resolution
from medconv.targets.dice_scores import ValidatedCase
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.segmentation import SegmentationTargets

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Validated:
    """A validated batch.

    Args:
        rows: by case id, as in `Targets.logged`.
        predicted: case and prediction, for label maps with the mean Dice, for `ImageLogger`.
        losses: by case id, as in `Targets.logged`.
    """

    rows: dict[str, Any]
    predicted: dict[str, Any]
    losses: dict[str, float | None] = field(default_factory=dict)


class Validation(Protocol):
    """Args: network: takes images (batch, channels, *spatial)."""

    def __call__(self, network: Callable[[Tensor], Tensor], batch: Batch) -> Validated: ...


@dataclass(frozen=True)
class LabelMapValidation:
    """The Dice of one case at a time, on its original grid; scored on the CPU if the GPU runs out of memory.

    Args:
        window: predicts whole cases.
        targets: decode the logits and score the label map.
        to_native: (logits (classes, *spatial), case id) -> label map (X, Y, Z) on the case's original grid.
        whole_batches: fill up a case's last batch of windows, since a compiled network would be compiled
            again for its size.
    """

    window: SlidingWindow
    targets: SegmentationTargets
    to_native: Callable[[Tensor, str], np.ndarray]
    whole_batches: bool = False

    def __call__(self, network: Callable[[Tensor], Tensor], batch: Batch) -> Validated:
        if self.whole_batches:
            network = partial(_in_whole_batches, network, self.window.batch_size)
        logits = self.window(network, batch["image"]).float()
        try:
            return self._scored(logits, batch)
        except torch.OutOfMemoryError:  # the loss and resampling need several times the logits' memory
            log.info("case %s: scored on the CPU, as the GPU's memory ran out", batch["case"])
        # Outside of the handler: its traceback would keep the GPU's tensors alive
        torch.cuda.empty_cache()
        return self._scored(logits.cpu(), batch)

    def _scored(self, logits: Tensor, batch: Batch) -> Validated:
        """Shape: logits (1, classes, *spatial), on the preprocessed grid; on a CPU if they filled the GPU."""
        label = batch["label"].to(logits.device, non_blocking=True)
        case = batch["case"]
        annotated = batch.get("annotated")
        validated = ValidatedCase(
            prediction=self.to_native(logits[0], case),
            reference=batch["reference"].cpu().numpy(),
            raters=batch.get("raters", ()),
            logits=logits,
            label=label,
            annotated=annotated,
        )
        row = self.targets.row(validated)
        loss = self.targets.cross_entropy(logits, label, annotated)
        return Validated(
            rows={case: row},
            predicted={
                "case": case,
                "prediction": self.targets.decode(logits[0]),
                "dice": self.targets.summary({case: row})["dice"],
            },
            losses={case: loss},
        )


def _in_whole_batches(network: Callable[[Tensor], Any], batch_size: int, images: Tensor) -> Tensor:
    """The network's logits of fewer images than its batch size, to which images of zeros are added."""
    missing = batch_size - len(images)
    zeros = images.new_zeros((missing, *images.shape[1:]))
    return full_resolution(network(torch.cat([images, zeros])))[: len(images)]


@dataclass(frozen=True)
class ImageLevelValidation:
    """The outputs and labels of a batch of cases. Args: flips: of mirror test-time augmentation."""

    targets: ImageLevelTargets
    flips: Sequence[tuple[int, ...]]

    def __call__(self, network: Callable[[Tensor], Tensor], batch: Batch) -> Validated:
        outputs = mean_over_flips(network, batch["image"], self.targets, self.flips)
        output_rows = outputs.tolist()
        label_rows = batch["label"].float().tolist()
        rows = {}
        for case, case_outputs, values in zip(batch["case"], output_rows, label_rows, strict=True):
            rows[case] = {"outputs": case_outputs, "values": values}
        return Validated(rows, {"case": batch["case"], "outputs": outputs})
