"""How much memory a prediction takes, said before it starts; fewer cases are loaded where it is small."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from medconv.data.case import Case, Grid
from medconv.data.io.grids import canonical_shape, canonical_spacing
from medconv.data.io.images import shape_and_affine
from medconv.data.io.nifti import check_memory
from medconv.data.preprocessing.preprocess import PreprocessingConfig, resampled_shape
from medconv.inference.load import LoadedModel
from medconv.inference.logit_stream import takes_half
from medconv.inference.prepare import is_plausible
from medconv.inference.sliding_window import slab_axis
from medconv.performance.memory_budget import total_memory
from medconv.utils.logging import size_text

log = logging.getLogger(__name__)
_LOADING = 12  # bytes a voxel and channel, measured: three times the float32 image
_LABEL = 4  # bytes a voxel: the label map on the content's grid and on the image's
# Bytes a voxel while probabilities are written: the sum over classes, a channel on the content's grid and on
# the image's.
_PROBABILITIES = 12
# Planes in work, in lengths of a window: its own, those not asked for yet, and of a row that a batch begins.
_PLANES = 1.4
_USABLE = 0.8  # share of the machine's memory
_LOOKED_AT = 8  # cases; headers of thousands would take minutes
_WORTH_SAYING = 2**30  # bytes


@dataclass(frozen=True)
class Need:
    """Bytes of a case: while it is loaded, while it is predicted, and while its probabilities are written."""

    shape: tuple[int, ...]
    loading: float
    predicting: float
    writing: float = 0.0

    def total(self, workers: int) -> float:
        """Of a case that is predicted, one that is written and one that waits, beside those that are being
        loaded.
        """
        return self.predicting + self.writing + (workers + 1) * self.loading


def fitting_workers(
    cases: Sequence[Case],
    members: Sequence[LoadedModel],
    workers: int,
    available: float | None = None,
    saves_probabilities: bool = False,
    only_labels: bool = True,
) -> int:
    """Cases to load at once: `workers`, or fewer if memory would run out; a line says what it takes.

    Args:
        members: networks for label maps; others take little.
        available: bytes; None: of this machine, or its container.
        saves_probabilities: all logits of a case are kept, in a file.
        only_labels: nothing but label maps and probabilities follows from the logits.
    """
    if not members[0].targets.per_voxel:
        return workers
    only_labels = only_labels and not saves_probabilities
    needs = [need for case in cases[:_LOOKED_AT] if (need := _need(case, members, only_labels))]
    if not needs:
        return workers
    if saves_probabilities:
        needs = [replace(need, writing=_PROBABILITIES * prod(need.shape)) for need in needs]
    largest = max(needs, key=lambda need: need.total(workers))
    machine = total_memory() if available is None else available
    usable = _USABLE * machine
    fitting = workers
    while fitting > 1 and largest.total(fitting) > usable:
        fitting -= 1
    if fitting < workers or largest.total(fitting) > _WORTH_SAYING:
        fewer = f", instead of {workers}" if fitting < workers else ""
        too_large = f"; this machine has {machine / 2**30:.1f} GB, and may kill the process"
        is_too_large = largest.total(fitting) > usable
        log.log(
            logging.WARNING if is_too_large else logging.INFO,
            "memory: about %.1f GB for %s voxels, the largest of the first %d cases; %d loaded at once%s%s",
            largest.total(fitting) / 2**30,
            size_text(largest.shape),
            len(needs),
            fitting,
            fewer,
            too_large if is_too_large else "",
        )
    return fitting


def _need(case: Case, members: Sequence[LoadedModel], only_labels: bool) -> Need | None:
    """None: the header cannot be read, or is refused, which prediction will say."""
    try:
        shape, affine = shape_and_affine(case.images[0])
        check_memory(case.images[0], shape)
    except (ValueError, OSError):
        return None
    grid = Grid.of(shape, affine)
    spacing_mm = canonical_spacing(grid, members[0].preprocessing.reorients)
    if members[0].source_spacing_mm is None and not is_plausible(spacing_mm, members[0]):
        return None
    voxels = prod(grid.shape)
    loading = _LOADING * voxels * len(members[0].modalities)
    # Members with the same preprocessing and windows share a sum.
    sums = list({(str(member.preprocessing), member.window): member for member in members}.values())
    shapes = [_prepared_shape(grid, member.preprocessing) for member in sums]
    axis = slab_axis([member.window for member in sums], shapes)
    logits = sum(
        _logit_bytes(member, shape, axis, only_labels) for member, shape in zip(sums, shapes, strict=True)
    )
    return Need(grid.shape, loading, logits + _LABEL * voxels)


def _prepared_shape(grid: Grid, preprocessing: PreprocessingConfig) -> tuple[int, ...]:
    spacing_mm = canonical_spacing(grid, preprocessing.reorients)
    shape = canonical_shape(grid, preprocessing.reorients)
    return resampled_shape(shape, spacing_mm, preprocessing.target_mm(spacing_mm))


def _logit_bytes(member: LoadedModel, shape: Sequence[int], axis: int, only_labels: bool) -> float:
    """Of the planes that windows still add to."""
    window = member.window
    window_length = 1 if window.slice_axis is not None else window.patch_size[axis]
    planes = min(shape[axis], _PLANES * window_length)
    values = planes * prod(shape) / shape[axis]
    value_bytes = 2 if only_labels and takes_half(member.targets.num_outputs, values) else 4
    return value_bytes * member.targets.num_outputs * values
