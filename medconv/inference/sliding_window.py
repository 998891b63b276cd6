"""Sliding-window inference: run a network that takes patches on a full image.

`SlidingWindow.stream` pads an image, lays windows over it, and returns a `LogitStream`. This runs the network
as planes are asked for, and holds only those that windows still add to.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, product
from math import ceil, inf, prod
from typing import Any

import numpy as np
import torch
from monai.data.utils import compute_importance_map
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torch.nn import functional as F

from medconv.config import Derived, Node, TaskConfig, arguments_as_keys, lists_to_tuples
from medconv.data.augmentation.augment import swapped_channels
from medconv.data.augmentation.spatial import mirrored_axes
from medconv.data.left_right import left_right_axis
from medconv.models.outputs import full_resolution
from medconv.utils.errors import ArgumentError
from medconv.utils.progress import track

log = logging.getLogger(__name__)


def usable_axes(
    requested: Any, spatial_dims: int, trained_axes: Sequence[int], equivariant_axes: Sequence[int]
) -> tuple[int, ...]:
    """The requested axes of mirror test-time augmentation without the equivariant ones, which change nothing.

    Args:
        requested: axes, `all` or None.
        spatial_dims: of the network, 2 or 3.
        trained_axes: axes along which the network saw mirrored images in training.
        equivariant_axes: axes along which a mirrored image gives mirrored logits by construction.
    Raises:
        ArgumentError: not spatial axes, or an axis that is neither, so that averaging over flips would make
            predictions worse.
    """
    axes = mirrored_axes(() if requested is None else requested, spatial_dims)

    # averaging over flips that a network never saw makes its predictions worse
    unseen = [axis for axis in axes if axis not in trained_axes and axis not in equivariant_axes]
    if unseen:
        problem = (
            f"={list(axes)} needs a network trained on mirrored images: add {unseen} to "
            f"augmentation.mirror_axes (now {list(trained_axes)}), or use conv=mirror or turns along them"
        )
        raise ArgumentError("mirror_axes", problem)

    skipped = [axis for axis in axes if axis in equivariant_axes]
    if skipped:
        log.info("mirror_axes: %s skipped, the network is equivariant along them", skipped)
    return tuple(axis for axis in axes if axis not in equivariant_axes)


def training_axes(augmentation: Node, spatial_dims: int) -> tuple[int, ...]:
    """Axes along which the network sees mirrored images in training. Raises: ValueError: no such axes."""
    with arguments_as_keys(mirror_axes="augmentation.mirror_axes"):
        return mirrored_axes(augmentation.get("mirror_axes") or (), spatial_dims)


# Of the Gaussian weights, as a share of the window.
_SIGMA = 1 / 8
# The largest weight of nnU-Net's Gaussian.
_PEAK = 10.0


@dataclass(frozen=True)
class WindowPlacement:
    """How windows are placed and weighted.

    Args:
        description: as an exported model states it.
        starts: (axis length, window size, overlap) -> first voxels of the windows, in voxels.
        weights: (window size of each axis, device) -> weights, (*window size) float32.
        sums_in_fp32: whether outputs are converted to float32 before they are weighted.
    """

    description: str
    starts: Callable[[int, int, float], list[int]]
    weights: Callable[[Sequence[int], torch.device], Tensor]
    sums_in_fp32: bool


def fixed_starts(length: int, window: int, overlap: float) -> list[int]:
    """First voxels of windows at a fixed distance; the last one ends with the axis and overlaps more.

    Args:
        length: of the axis, in voxels; at least `window`.
        overlap: share of a window, from 0 to below 1.
    Source: MONAI's `dense_patch_slices`.
    """
    distance = max(1, int(window * (1 - overlap)))
    steps = ceil((length - window) / distance)
    # The last window would end behind the axis.
    return [min(step * distance, length - window) for step in range(steps + 1)]


def even_starts(length: int, window: int, overlap: float) -> list[int]:
    """First voxels of windows at even distances: as few windows as overlap by at least that share.

    Args:
        length: of the axis, in voxels; at least `window`.
        overlap: share of a window, from 0 to below 1.
    Source: nnU-Net v2's `compute_steps_for_sliding_window`.
    """
    steps = ceil((length - window) / (window * (1 - overlap)))
    if steps == 0:
        return [0]
    distance = (length - window) / steps
    # Halves are rounded to even numbers, as by NumPy.
    return [round(distance * step) for step in range(steps + 1)]


def monai_weights(window_size: Sequence[int], device: torch.device) -> Tensor:
    """A Gaussian about the middle of the window, at least 0.001. Shape: (*window_size) float32."""
    return compute_importance_map(tuple(window_size), mode="gaussian", sigma_scale=_SIGMA, device=device)


def nnunet_weights(window_size: Sequence[int], device: torch.device) -> Tensor:
    """A Gaussian about the middle voxel, the right one of two, in float16's precision.

    Shape: (*window_size) float32.
    Source: nnU-Net v2's `compute_gaussian`.
    """
    return _nnunet_weights(tuple(window_size)).to(device)


@lru_cache(8)
def _nnunet_weights(window_size: tuple[int, ...]) -> Tensor:
    middle = tuple(size // 2 for size in window_size)
    peak = np.zeros(window_size)
    peak[middle] = 1
    sigmas = [size * _SIGMA for size in window_size]
    gaussian = gaussian_filter(peak, sigmas, mode="constant")
    scaled = gaussian * (_PEAK / gaussian.max())
    weights = torch.from_numpy(scaled).half().float()
    # float16 rounds the corners of large windows to 0, and a sum of weights must not be 0.
    smallest = weights[weights > 0].min()
    return weights.clamp(min=float(smallest))


FIXED_DISTANCE = WindowPlacement(
    description="gaussian", starts=fixed_starts, weights=monai_weights, sums_in_fp32=False
)
EVEN_DISTANCE = WindowPlacement(
    description="gaussian, windows at even distances as nnU-Net's",
    starts=even_starts,
    weights=nnunet_weights,
    sums_in_fp32=True,
)

_BATCH_LOGITS = 2**24  # in one forward pass on a CPU: 64 MiB in fp32
_MAX_CONSTANTS = 4  # values whose logits are kept
_VALUES_AT_ONCE = 2**22  # of a window's logits that are weighted; all of 105 classes in 64^3 are 110 MB
_HALF_ABOVE = 2**30  # bytes of the planes in fp32; more have fp16, where only labels follow from them


@dataclass(frozen=True)
class SlidingWindow:
    """Overlapping windows of the training patch's size, blended with Gaussian weights.

    Args:
        patch_size: of a window, in voxels.
        overlap: of neighbouring windows, as a share of a window, from 0 to below 1.
        batch_size: windows in one forward pass.
        mirror_axes: spatial axes of test-time augmentation: logits are the mean over all flips along them.
        slice_axis: the axis of a volume that a 2D network takes slice by slice, else None.
        flip_label_pairs: channels, such as of left and right kidney, that a left-right flip exchanges.
        placement: where windows begin and how they are weighted; by default as in MONAI.
        progress: a bar counts the forward passes of an image.
    Raises:
        ArgumentError: overlap, batch_size (named `sw_batch_size`, as by users) or mirror_axes out of range.
    """

    patch_size: tuple[int, ...]
    overlap: float = 0.5
    batch_size: int = 4
    mirror_axes: tuple[int, ...] = ()
    slice_axis: int | None = None
    flip_label_pairs: tuple[tuple[int, int], ...] = ()
    placement: WindowPlacement = FIXED_DISTANCE
    progress: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < 1:
            raise ArgumentError("overlap", f" must be at least 0 and below 1, got {self.overlap}")
        if type(self.batch_size) is not int or self.batch_size < 1:
            problem = f" must be a whole number of at least 1, got {self.batch_size}"
            raise ArgumentError("sw_batch_size", problem)
        mirrored_axes(tuple(self.mirror_axes), len(self.patch_size))

    def in_small_batches(self, num_outputs: int, device: torch.device) -> "SlidingWindow":
        """On a CPU large batches save no time, and the logits of a batch with many classes are large."""
        if device.type != "cpu":
            return self
        values = num_outputs * prod(self.patch_size)
        return replace(self, batch_size=max(1, min(self.batch_size, _BATCH_LOGITS // values)))

    @torch.no_grad()
    def __call__(self, network: Callable[[Tensor], Any], images: Tensor) -> Tensor:
        """The logits of whole images; on the CPU if they do not fit into GPU memory, with the same values.

        They have no gradients.

        Shape: (images, channels, *spatial) -> logits (images, classes, *spatial).
        """
        axis = self.slice_axis or 0
        all_logits = []
        for image in images:
            stream = self.stream(network, image, axis)
            logits = stream.take(0, stream.length).movedim(1, 1 + axis)
            all_logits.append(logits[None])
        # Concatenation copies.
        return all_logits[0] if len(images) == 1 else torch.cat(all_logits)

    def stream(
        self,
        network: Callable[[Tensor], Any],
        image: Tensor,
        axis: int,
        planes_at_once: int | None = None,
        only_labels: bool = False,
    ) -> "LogitStream":
        """The logits of an image, plane after plane along an axis; `take` runs the network.

        Shape: image (channels, *spatial).
        Args:
            axis: of the planes; for slices, `slice_axis`.
            planes_at_once: at most so many planes are taken at once; None: all of them.
            only_labels: only label maps follow from the logits, which may have fp16 where fp32 takes much
                memory.
        """
        # Planes first: (channels, planes, *in_plane), at least of a window's size.
        volume = image.movedim(1 + axis, 1)
        weights = self.placement.weights(self.patch_size, image.device)
        # A slice is a window of one plane.
        weights = weights.movedim(axis, 0) if self.slice_axis is None else weights[None]
        shape = volume.shape[1:]
        missing = [max(0, edge - length) for edge, length in zip(weights.shape, shape, strict=True)]
        before = [voxels // 2 for voxels in missing]
        content = [slice(start, start + length) for start, length in zip(before, shape, strict=True)]
        if any(missing):
            # Before and after each axis, the last axis first, as `F.pad` takes them.
            pairs = zip(before[::-1], missing[::-1], strict=True)
            volume = F.pad(volume, [pad for first, both in pairs for pad in (first, both - first)])
        windows = _windows(volume, weights.shape, self.overlap, self.placement)
        batches = [
            windows[first : first + self.batch_size] for first in range(0, len(windows), self.batch_size)
        ]
        return LogitStream(
            batches,
            _WindowLogits(self, network, volume, axis),
            weights,
            volume.shape[1:],
            content,
            planes_at_once=planes_at_once,
            only_labels=only_labels,
            progress=self.progress,
        )


def window_of(
    task: TaskConfig, derived: Derived, axes: tuple[int, ...], convention: str | None
) -> SlidingWindow:
    """The windows over volumes.

    Args:
        axes: of mirror test-time augmentation.
        convention: of `data`.
    Raises:
        ConfigError: a key of `task` is out of range.
    """
    with arguments_as_keys("task"):
        return SlidingWindow(
            patch_size=tuple(derived.patch_size),
            overlap=task.overlap,
            batch_size=task.sw_batch_size,
            mirror_axes=axes,
            slice_axis=derived.slice_axis,
            flip_label_pairs=lists_to_tuples(derived.flip_label_pairs or []),
            placement=FIXED_DISTANCE if convention is None else EVEN_DISTANCE,
        )


@dataclass(frozen=True)
class Window:
    """Where a window lies.

    Args:
        box: in the padded image, planes first.
        constant: the value of each channel, if all voxels have it.
    """

    box: tuple[slice, ...]
    constant: tuple[float, ...] | None = None


def _windows(volume: Tensor, size: Sequence[int], overlap: float, placement: WindowPlacement) -> list[Window]:
    """All windows, by their first plane; along the last axis they change fastest.

    Shape: volume (channels, planes, *in_plane).
    """
    # Windows of one voxel, such as slices, cannot overlap.
    starts = [
        list(range(length)) if edge == 1 else placement.starts(length, edge, overlap)
        for length, edge in zip(volume.shape[1:], size, strict=True)
    ]
    boxes = [
        tuple(slice(start, start + edge) for start, edge in zip(corner, size, strict=True))
        for corner in product(*starts)
    ]
    # One transfer from a GPU for the constants of all of them.
    ends = [volume[:, *box].flatten(1).aminmax(dim=1) for box in boxes]
    lowest = torch.stack([each.min for each in ends])
    is_constant = (lowest == torch.stack([each.max for each in ends])).all(1).tolist()
    return [
        Window(box, tuple(values) if same else None)
        for box, values, same in zip(boxes, lowest.tolist(), is_constant, strict=True)
    ]


@dataclass
class _WindowLogits:
    """Cuts windows from a volume and runs the network on them, and on their flips.

    Windows of one value, such as air, have one answer, which is computed once.

    Args:
        volume: (channels, planes, *in_plane), padded.
        axis: where the network has the planes' axis.
        known: the answers of some values.
    """

    settings: SlidingWindow
    network: Callable[[Tensor], Any]
    volume: Tensor
    axis: int
    known: dict[tuple[float, ...] | None, Tensor] = field(default_factory=dict)

    def __call__(self, windows: Sequence[Window]) -> list[Tensor]:
        """Each (classes, depth, *in_plane)."""
        kept = set(self.known)
        unknown: list[Window] = []
        for window in windows:
            if window.constant in kept:
                continue
            unknown.append(window)
            if window.constant is not None and len(kept) < _MAX_CONSTANTS:
                kept.add(window.constant)
        not_kept: list[Tensor] = []
        for window, logits in zip(unknown, self._run(unknown) if unknown else (), strict=True):
            if window.constant in kept:
                # Without the memory of the other windows.
                self.known[window.constant] = logits.clone()
            else:
                not_kept.append(logits)
        in_order = iter(not_kept)
        return [
            self.known[window.constant] if window.constant in kept else next(in_order) for window in windows
        ]

    @torch.no_grad()
    def _run(self, windows: Sequence[Window]) -> Tensor:
        """Shape: -> (windows, classes, depth, *in_plane)."""
        mirror_axes, slice_axis = self.settings.mirror_axes, self.settings.slice_axis
        patches = torch.stack([self.volume[:, *window.box] for window in windows])
        # As the network takes them: (windows, channels, *patch_size).
        patches = patches.movedim(2, 2 + self.axis) if slice_axis is None else patches[:, :, 0]
        # Returned as they are on a CPU where nothing is flipped: they can be large.
        logit_sum = full_resolution(self.network(patches))
        if logit_sum.is_cuda:  # a CUDA graph's next run overwrites its outputs
            logit_sum = logit_sum.clone()
        # In a fixed order: sums of floats depend on it.
        for is_flipped in product((False, True), repeat=len(mirror_axes)):
            flipped = [axis for axis, flips in zip(mirror_axes, is_flipped, strict=True) if flips]
            if not flipped:
                continue
            dims = [2 + axis for axis in flipped]
            logits = full_resolution(self.network(patches.flip(dims))).flip(dims)
            if left_right_axis(slice_axis) in flipped:
                logits = swapped_channels(logits, self.settings.flip_label_pairs)
            # `flip` has copied `logits`, so they may be overwritten; the first sum is the network's.
            logit_sum = logits.add_(logit_sum)
        mean = logit_sum.div_(2 ** len(mirror_axes)) if mirror_axes else logit_sum
        mean = mean.movedim(2 + self.axis, 2) if slice_axis is None else mean[:, :, None]
        return mean.float() if self.settings.placement.sums_in_fp32 else mean


class LogitStream:
    """The mean of overlapping windows' logits, weighted, along one axis of the image.

    In memory are the planes from the first that may be asked for to the last of the windows at hand, so it
    does not grow with the length of the axis. They are no ring: planes that are asked for would wrap around
    it, and be copied. If they do not fit into a GPU, they go on in the computer's memory.

    They are weighted sums, divided in the end, in fp32. In fp16 they are the mean of the windows so far: it
    has the size of logits, where sums may overflow, and products with a corner's small weights lose digits.
    Once a logit exceeds the range of fp16, the mean goes on in fp32: clipped, classes would be equal.

    Args:
        batches: of windows, which are ordered by their first plane.
        network: takes a batch to its logits, each (classes, depth, *in_plane).
        weights: of a window's voxels, (depth, *in_plane), on the device of the planes.
        shape: of the padded image, planes first: (length, *in_plane).
        content: the box of the image in its padding, planes first.
        planes_at_once, only_labels: as of `SlidingWindow.stream`.
        progress: a bar counts the batches.

    Attributes:
        length: planes of the image.
        num_values: of the planes in memory, per class.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[Window]],
        network: Callable[[Sequence[Window]], Sequence[Tensor]],
        weights: Tensor,
        shape: Sequence[int],
        content: Sequence[slice],
        *,
        planes_at_once: int | None,
        only_labels: bool,
        progress: bool,
    ) -> None:
        planes, *self._in_plane = content
        self._offset = planes.start
        self.length = planes.stop - planes.start
        self._network = network
        self._weights = weights
        self._shape = tuple(shape)
        self._device = weights.device
        self._batches = iter(track(batches, "predicting") if progress else batches)
        # After each batch, the planes before the next batch's first one are complete.
        first_planes = [*(batch[0].box[0].start for batch in batches), shape[0]]
        self._complete_after = iter(first_planes[1:])
        spans = [
            batch[-1].box[0].stop - first
            for batch, (first, _) in zip(batches, pairwise(first_planes), strict=True)
        ]
        # When the next windows are added, at least one of the planes that are asked for is theirs.
        self._capacity = min(shape[0], max(spans) + (planes_at_once or shape[0]) - 1)
        self.num_values = self._capacity * prod(shape[1:])
        self._start = 0  # first plane in memory
        self._first = 0  # first plane that may be asked for
        self._complete = 0  # planes before this one have all their windows
        self._only_labels = only_labels
        self._is_mean = False  # `_sum` is the mean of the windows so far
        self._sum = torch.empty(0)
        self._weight_sum = torch.empty(0)
        self._weighted = torch.empty(0)

    def take(self, first: int, stop: int) -> Tensor:
        """The planes from `first` to `stop`; those before `first` are never asked for again.

        They may lie in memory that the next call changes.
        Shape: (classes, stop - first, *in_plane), float16, float32 or float64.
        """
        first, stop = first + self._offset, stop + self._offset
        self._first = first
        while self._complete < stop:
            self._add_batch()
        return self._sum[:, first - self._start : stop - self._start, *self._in_plane]

    def _add_batch(self) -> None:
        """The next batch of windows: run, weight, add; then divide the planes that it completes."""
        batch = next(self._batches)
        all_logits = self._logits_of(batch)
        # Planes that are not asked for again give way to those of this batch.
        if batch[-1].box[0].stop - self._start > self._capacity:
            start = min(self._first, self._complete)
            for summed in (self._sum, self._weight_sum):
                _drop(summed, start - self._start)
            self._start = start
        classes_at_once = len(self._weighted)
        for window, logits in zip(batch, all_logits, strict=True):
            planes, *in_plane = window.box
            box = (slice(None), slice(planes.start - self._start, planes.stop - self._start), *in_plane)
            self._weight_sum[box] += self._weights
            share = (self._weights / self._weight_sum[box]).to(self._sum.dtype) if self._is_mean else None
            for first in range(0, len(logits), classes_at_once):
                some_logits = logits[first : first + classes_at_once]
                some_sums = self._sum[first : first + classes_at_once][box]
                weighted = self._weighted[: len(some_logits)]
                if share is not None:
                    some_sums.lerp_(weighted.copy_(some_logits), share)
                else:
                    some_sums += torch.mul(some_logits, self._weights, out=weighted)
        complete = next(self._complete_after)
        if not self._is_mean:
            done = slice(self._complete - self._start, complete - self._start)
            self._sum[:, done] /= self._weight_sum[:, done]
        self._complete = complete

    def _logits_of(self, batch: Sequence[Window]) -> list[Tensor]:
        """The logits of each window, on the device of the planes."""
        try:
            return self._on_device(self._network(batch))
        # The GPU's error; the CPU raises another class.
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        if self._device.type != "cpu":
            log.info("the logits of this image do not fit into GPU memory; summing them on the CPU")
        self._device = torch.device("cpu")
        if self._sum.numel():
            self._sum = self._sum.cpu()
            self._weight_sum = self._weight_sum.cpu()
            self._weights = self._weights.cpu()
        return self._on_device(self._network(batch))

    def _on_device(self, logits: Sequence[Tensor]) -> list[Tensor]:
        """The first ones say how large the planes are."""
        if not self._sum.numel():
            # Half-precision logits are weighted in their own precision, as MONAI does, and summed in fp32.
            dtype = torch.promote_types(logits[0].dtype, torch.float32)
            self._weights = self._weights.to(self._device, dtype)
            planes = (self._capacity, *self._shape[1:])
            self._weight_sum = torch.zeros((1, *planes), dtype=dtype, device=self._device)
            self._is_mean = self._only_labels and takes_half(len(logits[0]), self.num_values)
            if self._is_mean and _fit_half(logits):
                dtype = torch.float16
            self._sum = torch.zeros((len(logits[0]), *planes), dtype=dtype, device=self._device)
            # Of some classes, apart from the logits: a network may return its input. One for all windows,
            # since fresh memory costs more than the multiplication.
            classes_at_once = max(1, _VALUES_AT_ONCE // logits[0][0].numel())
            weighted_shape = (min(classes_at_once, len(logits[0])), *logits[0].shape[1:])
            self._weighted = torch.empty(weighted_shape, dtype=dtype if self._is_mean else logits[0].dtype)
        elif self._sum.dtype == torch.float16 and not _fit_half(logits):
            log.info(
                "logits exceed the range of fp16: continuing in fp32, which takes %.1f GB instead of %.1f",
                4 * self._sum.numel() / 2**30,
                2 * self._sum.numel() / 2**30,
            )
            self._sum = self._sum.float()
            self._weighted = self._weighted.float()
        self._weighted = self._weighted.to(self._device)
        return [each.to(self._device) for each in logits]


def takes_half(classes: int, values: float) -> bool:
    """Whether the mean of so many values per class has fp16 where only labels follow from it."""
    return 4 * classes * values > _HALF_ABOVE


def _fit_half(logits: Sequence[Tensor]) -> bool:
    """Whether logits that are finite are so in fp16."""
    ends = torch.stack([torch.stack(each.aminmax()) for each in logits])
    return not torch.finfo(torch.float16).max < float(ends.abs().max()) < inf


def _drop(planes: Tensor, count: int) -> None:
    """The first planes give way to those behind them, and as many of zeros follow.

    Shape: planes (classes, planes, *in_plane).
    """
    length = planes.shape[1]
    for first in range(0, length - count, count):
        # No more than `count` at once, so that none is overwritten before it is moved.
        target = planes[:, first : min(first + count, length - count)]
        target.copy_(planes[:, first + count : first + count + target.shape[1]])
    planes[:, length - count :] = 0


def slab_axis(windows: Sequence[SlidingWindow], shapes: Sequence[Sequence[int]]) -> int:
    """The axis along which predictions are made: that of slices, else the one with the fewest voxels in work.

    In work is a window's length of each prediction. Of equal axes the longest is taken.

    Args:
        windows: of the networks.
        shapes: of the image as each of them takes it, (*spatial).
    """
    for window in windows:
        if window.slice_axis is not None:
            return window.slice_axis
    in_work = [
        sum(
            min(window.patch_size[axis], shape[axis]) * prod(shape) // shape[axis]
            for window, shape in zip(windows, shapes, strict=True)
        )
        for axis in range(len(windows[0].patch_size))
    ]
    return min(range(len(in_work)), key=lambda axis: (in_work[axis], -shapes[0][axis]))
