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
from medconv.data.preprocessing.preprocess import CropInfo, SlabGrid, to_native
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
        crop_info: case id to where its content lies in the original grid.
        whole_batches: fill up a case's last batch of windows, since a compiled network would be compiled
            again for its size.
    """

    window: SlidingWindow
    targets: SegmentationTargets
    crop_info: Callable[[str], CropInfo]
    whole_batches: bool = False

    def __call__(
        self, network: Callable[[Tensor], Tensor], batch: Batch, keeps_prediction: bool = False
    ) -> Validated:
        window = self.window.in_small_batches(self.targets.num_outputs, batch["image"].device)
        if self.whole_batches:
            network = partial(_in_whole_batches, network, window.batch_size)
        case = batch["case"]
        annotated = batch.get("annotated")
        crop_info = self.crop_info(case)
        image = batch["image"][0]
        axis = slab_axis([window], [image.shape[1:]])
        grid = SlabGrid(crop_info, axis, image.shape[1 + axis])
        only_labels = not self.targets.scores_probabilities
        stream = window.stream(network, image, axis, grid.planes_at_once, only_labels)
        group = Group(grid, 1.0, [Source(stream, 1.0)], _accept)
        # Shape: (channels, *spatial) -> (channels, planes, *in_plane).
        label = batch["label"][0].movedim(1 + axis, 1)
        on_prepared_grid = _OnPreparedGrid(self.targets, label, annotated, keeps_prediction)
        content = label_map_of([group], self.targets, sinks=[on_prepared_grid])
        prediction = to_native(content, crop_info)
        validated = ValidatedCase(
            prediction=prediction,
            reference=batch["reference"].cpu().numpy(),
            raters=batch.get("raters", ()),
            logits=on_prepared_grid.logits(axis),
            label=batch["label"],
            annotated=annotated,
        )
        row = self.targets.scores.row(validated)
        loss = on_prepared_grid.cross_entropy
        if loss is not None and not math.isfinite(loss):
            warn_of_nonfinite(case)
        return Validated(
            rows={case: row},
            predicted={
                "case": case,
                "prediction": on_prepared_grid.label_map(axis),
                "dice": self.targets.scores.summary({case: row})["dice"],
            },
            losses={case: loss},
        )


def _accept(logits: Tensor) -> None:
    """Logits that are not finite are scored like others: training has its own guard."""


class _OnPreparedGrid:
    """What follows from the logits before they are resampled: the loss, and for pictures a label map.

    Args:
        label: (channels, planes, *in_plane), on the host.
        annotated: as in `SegmentationTargets.cross_entropy`.
        keeps_prediction: else logits are not decoded a second time, for pictures that nobody looks at.
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
        self._entropy_sum = 0.0
        self._labelled = 0
        self._kept: list[Tensor] = []
        self._prediction = torch.zeros(label.shape[1:], dtype=torch.int16) if keeps_prediction else None

    @property
    def cross_entropy(self) -> float | None:
        """The mean over the labelled voxels; None if there are none."""
        return self._entropy_sum / self._labelled if self._labelled else None

    def put(self, first: int, logits: Tensor) -> None:
        """As of `LogitSink`."""
        stop = first + logits.shape[1]
        planes = slice(self._planes, stop)
        new = _Planes(logits[:, self._planes - first :], self._label[:, planes])
        if self._prediction is not None:
            decoded = with_cpu_fallback(new, lambda each: self._targets.decode(each.logits))
            self._prediction[planes] = decoded.cpu()
        entropy = with_cpu_fallback(new, self._mean_entropy)
        if entropy is not None:
            is_labelled = self._targets.labelled(new.label)
            voxels = new.label[0].numel() if is_labelled is None else int(is_labelled.sum())
            self._entropy_sum += voxels * entropy
            self._labelled += voxels
        if self._targets.scores_probabilities:
            # A copy: the stream will reuse the memory.
            self._kept.append(new.logits.to("cpu", torch.float32, copy=True))
        self._planes = stop

    def label_map(self, axis: int) -> Tensor | None:
        """Shape: (*spatial); None: it was not kept. Args: axis: of the planes."""
        return None if self._prediction is None else self._prediction.movedim(0, axis)

    def logits(self, axis: int) -> Tensor | None:
        """Shape: (1, outputs, *spatial), if the targets score probabilities. Args: axis: of the planes."""
        if not self._kept:
            return None
        return torch.cat(self._kept, 1).movedim(1, 1 + axis)[None]

    def _mean_entropy(self, planes: _Planes) -> float | None:
        return self._targets.cross_entropy(planes.logits[None].float(), planes.label[None], self._annotated)


@dataclass(frozen=True)
class _Planes:
    """Some planes of a case: logits (outputs, planes, *in_plane), label (channels, planes, *in_plane)."""

    logits: Tensor
    label: Tensor

    def on_cpu(self) -> _Planes:
        return _Planes(self.logits.cpu(), self.label.cpu())


def warn_of_nonfinite(case: str) -> None:
    log.warning("case %s: the network's outputs are not finite, so its scores say nothing", case)


def _in_whole_batches(network: Callable[[Tensor], Any], batch_size: int, images: Tensor) -> Tensor:
    """The network's logits of fewer images than its batch size, to which images of zeros are added."""
    missing = batch_size - len(images)
    zeros = images.new_zeros((missing, *images.shape[1:]))
    return full_resolution(network(torch.cat([images, zeros])))[: len(images)]
