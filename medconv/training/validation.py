"""What a validation does with a case: label maps by sliding windows, as in prediction."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from medconv.data.loading.patch import Batch
from medconv.data.preprocessing.preprocess import SlabGrid, to_native
from medconv.inference.slab_answer import Group, Source, label_map_of, with_cpu_fallback
from medconv.inference.sliding_window import SlidingWindow, slab_axis
from medconv.models.outputs import full_resolution
from medconv.targets.scores import ValidatedCase
from medconv.targets.segmentation import SegmentationTargets

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Validated:
    """A validated batch.

    Args:
        rows: by case id, as in `Scores.logged`.
        predicted: for pictures, as the views of the kind of targets take it.
        losses: by case id, as in `Scores.logged`.
    """

    rows: dict[str, Any]
    predicted: dict[str, Any]
    losses: dict[str, float | None] = field(default_factory=dict)


class Validation(Protocol):
    """Args: network: takes images (batch, channels, *spatial). keeps_prediction: for pictures."""

    def __call__(
        self, network: Callable[[Tensor], Tensor], batch: Batch, keeps_prediction: bool = False
    ) -> Validated: ...


@dataclass(frozen=True)
class LabelMapValidation:
    """The Dice of one case at a time, on its original grid, by slabs as in prediction.

    Args:
        window: predicts whole cases.
        targets: decode the logits and score the label map.
        whole_batches: fill up a case's last batch of windows, since a compiled network would be compiled
            again for its size.
    """

    window: SlidingWindow
    targets: SegmentationTargets
    whole_batches: bool = False

    def __call__(
        self, network: Callable[[Tensor], Tensor], batch: Batch, keeps_prediction: bool = False
    ) -> Validated:
        window = self.window.in_small_batches(self.targets.num_outputs, batch["image"].device)
        if self.whole_batches:
            network = partial(in_whole_batches, network, window.batch_size)
        case = batch["case"]
        annotated = batch.get("annotated")
        crop_info = batch["crop_info"].value
        group = group_of(window, network, batch, only_labels=not self.targets.scores_probabilities)
        axis = group.grid.axis
        # Shape: (channels, *spatial) -> (channels, planes, *in_plane).
        label = batch["label"][0].movedim(1 + axis, 1)
        seen = _OnPreparedGrid(self.targets, label, annotated, keeps_prediction)
        content = label_map_of([group], self.targets, sinks=[seen])
        logits = None
        if seen.logits:  # (outputs, planes, *in_plane) in pieces -> (1, outputs, *spatial)
            logits = torch.cat(seen.logits, 1).movedim(1, 1 + axis)[None]
        validated = ValidatedCase(
            prediction=self.targets.answer(to_native(content, crop_info)),
            reference=batch["reference"].cpu().numpy(),
            raters=batch.get("raters", ()),
            logits=logits,
            label=batch["label"],
            annotated=annotated,
        )
        row = self.targets.scores.row(validated)
        # The mean over the labelled voxels
        loss = seen.entropy_sum / seen.labelled if seen.labelled else None
        if loss is not None and not math.isfinite(loss):
            warn_of_nonfinite(case)
        predicted: dict[str, Any] = {}
        if seen.prediction is not None:
            predicted = {
                "case": case,
                "prediction": seen.prediction.movedim(0, axis),
                "dice": self.targets.scores.summary({case: row})["dice"],
            }
        return Validated(rows={case: row}, predicted=predicted, losses={case: loss})


def group_of(
    window: SlidingWindow, network: Callable[[Tensor], Tensor], batch: Batch, only_labels: bool
) -> Group:
    """The logits of a prepared case, in slabs. Args: only_labels: as of `SlidingWindow.stream`."""
    image = batch["image"][0]
    axis = slab_axis([window], [image.shape[1:]])
    grid = SlabGrid(batch["crop_info"].value, axis, image.shape[1 + axis])
    stream = window.stream(network, image, axis, grid.planes_at_once, only_labels)
    # Logits that are not finite are scored like others: training has its own guard
    return Group(grid, 1.0, [Source(stream, 1.0)], check=lambda logits: None)


class _OnPreparedGrid:
    """What follows from the logits before they are resampled: the loss, and for pictures a label map.

    Args:
        label: (channels, planes, *in_plane), on the host.
        annotated: as in `SegmentationTargets.cross_entropy`.
        keeps_prediction: else logits are not decoded a second time, for pictures that nobody looks at.
    Attributes:
        entropy_sum: cross-entropy of so many `labelled` voxels.
        logits: all of them, (outputs, planes, *in_plane) in pieces, if the targets score probabilities.
        prediction: label map (planes, *in_plane), if it is kept.
    """

    def __init__(
        self,
        targets: SegmentationTargets,
        label: Tensor,
        annotated: Sequence[bool] | None,
        keeps_prediction: bool,
    ) -> None:
        self._targets = targets
        self._label = label
        self._annotated = annotated
        self._planes = 0  # so many were taken
        self.entropy_sum = 0.0
        self.labelled = 0
        self.logits: list[Tensor] = []
        self.prediction = torch.zeros(label.shape[1:], dtype=torch.int16) if keeps_prediction else None

    def put(self, first: int, logits: Tensor) -> None:
        """As of `LogitSink`."""
        stop = first + logits.shape[1]
        planes = slice(self._planes, stop)
        new = logits[:, self._planes - first :]
        label = self._label[:, planes]
        if self.prediction is not None:
            self.prediction[planes] = with_cpu_fallback(self._targets.decode, new).cpu()
        entropy = with_cpu_fallback(self._entropy, new, label)
        if entropy is not None:
            is_labelled = self._targets.labelled(label)
            voxels = label[0].numel() if is_labelled is None else int(is_labelled.sum())
            self.entropy_sum += voxels * entropy
            self.labelled += voxels
        if self._targets.scores_probabilities:
            # A copy: the stream will reuse the memory.
            self.logits.append(new.to("cpu", torch.float32, copy=True))
        self._planes = stop

    def _entropy(self, logits: Tensor, label: Tensor) -> float | None:
        return self._targets.cross_entropy(logits[None].float(), label[None], self._annotated)


def warn_of_nonfinite(case: str) -> None:
    log.warning("case %s: the network's outputs are not finite, so its scores say nothing", case)


def in_whole_batches(network: Callable[[Tensor], Any], batch_size: int, images: Tensor) -> Tensor:
    """The network's logits of fewer images than its batch size, to which images of zeros are added."""
    missing = batch_size - len(images)
    zeros = images.new_zeros((missing, *images.shape[1:]))
    return full_resolution(network(torch.cat([images, zeros])))[: len(images)]
