"""Sliding-window inference: run a network that takes patches on a full image."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, product
from math import ceil, prod
from typing import Any

import numpy as np
import torch
from monai.data.utils import compute_importance_map
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torch.nn import functional as F

from medconv.config import Node, arguments_as_keys
from medconv.data.augmentation.spatial import mirrored_axes
from medconv.data.preprocessing.preprocess import left_right_axis
from medconv.inference.logit_stream import LogitStream, Window
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
            f"augmentation.mirror_axes (now {list(trained_axes)}), or use conv=mirror along them"
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


def swapped(logits: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """The logits (batch, classes, *spatial) with the classes of each pair exchanged."""
    if not pairs:
        return logits
    order = list(range(logits.shape[1]))
    for left, right in pairs:
        order[left] = right
        order[right] = left
    return logits[:, order]


def flips(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """All sets of the axes, the empty one first."""
    subsets: list[tuple[int, ...]] = []
    for count in range(len(axes) + 1):
        subsets.extend(combinations(sorted(axes), count))
    return subsets


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
        ValueError: overlap, batch_size or mirror_axes are out of range.
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
        check_overlap("overlap", self.overlap)
        check_batch_size("batch_size", self.batch_size)
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
    ) -> LogitStream:
        """The logits of an image, plane after plane along an axis; `take` runs the network.

        Shape: image (channels, *spatial).
        Args:
            axis: of the planes; for slices, `slice_axis`.
            planes_at_once, only_labels: as in `LogitStream`.
        """
        # Planes first: (channels, planes, *in_plane).
        volume = image.movedim(1 + axis, 1)
        if self.slice_axis is None:
            size = (self.patch_size[axis], *_without(self.patch_size, axis))
        else:
            size = (1, *self.patch_size)
        padded, content = _padded(volume, size)
        cut = _Cut(padded, size, axis, takes_slices=self.slice_axis is not None)
        weights = self.placement.weights(self.patch_size, image.device)
        depth_first = weights.movedim(axis, 0) if self.slice_axis is None else weights[None]

        @torch.no_grad()
        def logits_of(windows: Sequence[Window]) -> Tensor:
            logits = cut.planes_first(self._mean_over_flips(network, cut.patches(windows)))
            return logits.float() if self.placement.sums_in_fp32 else logits

        return LogitStream(
            cut.with_constants(_windows(padded.shape[1:], size, self.overlap, self.placement)),
            _OncePerConstant(logits_of),
            depth_first,
            padded.shape[1:],
            content,
            batch_size=self.batch_size,
            planes_at_once=planes_at_once,
            only_labels=only_labels,
            device=image.device,
            track=_bar if self.progress else iter,
        )

    def _mean_over_flips(self, network: Callable[[Tensor], Any], windows: Tensor) -> Tensor:
        """The network's logits, returned as they are where nothing is flipped: they can be large."""
        logit_sum = full_resolution(network(windows))
        for flips in _nonempty_flips(self.mirror_axes):
            dims = [2 + axis for axis in flips]
            flipped_logits = full_resolution(network(windows.flip(dims)))
            logits = flipped_logits.flip(dims)
            if left_right_axis(self.slice_axis) in flips:
                logits = swapped(logits, self.flip_label_pairs)
            # `flip` has copied `logits`, so they may be overwritten; the first sum is the network's.
            logit_sum = logits.add_(logit_sum)
        if not self.mirror_axes:
            return logit_sum
        return logit_sum.div_(2 ** len(self.mirror_axes))


@dataclass(frozen=True)
class _Cut:
    """Cuts windows from a volume, as the network takes them.

    Args:
        volume: (channels, planes, *in_plane).
        size: of a window, depth first.
        axis: where the network has the planes' axis.
        takes_slices: whether the network takes single planes.
    """

    volume: Tensor
    size: tuple[int, ...]
    axis: int
    takes_slices: bool

    def patches(self, windows: Sequence[Window]) -> Tensor:
        """Shape: -> (windows, channels, *patch_size)."""
        depth = self.size[0]
        patches = torch.stack(
            [
                self.volume[:, window.first_plane : window.first_plane + depth, *window.box]
                for window in windows
            ]
        )
        return patches[:, :, 0] if self.takes_slices else patches.movedim(2, 2 + self.axis)

    def with_constants(self, windows: Sequence[Window]) -> list[Window]:
        """The windows with their `constant`; one transfer from a GPU for all of them."""
        depth = self.size[0]
        lowest: list[Tensor] = []
        highest: list[Tensor] = []
        for window in windows:
            planes = slice(window.first_plane, window.first_plane + depth)
            low, high = self.volume[:, planes, *window.box].flatten(1).aminmax(dim=1)
            lowest.append(low)
            highest.append(high)
        values = torch.stack(lowest)
        is_constant = (values == torch.stack(highest)).all(1).tolist()
        return [
            replace(window, constant=tuple(constant)) if same else window
            for window, constant, same in zip(windows, values.tolist(), is_constant, strict=True)
        ]

    def planes_first(self, logits: Tensor) -> Tensor:
        """Shape: (windows, classes, *patch_size) -> (windows, classes, *size)."""
        return logits[:, :, None] if self.takes_slices else logits.movedim(2 + self.axis, 2)


class _OncePerConstant:
    """Windows of one value, such as air, have one answer, which is computed once.

    Args:
        network: takes windows to their logits, (windows, classes, depth, *in_plane).
    """

    def __init__(self, network: Callable[[Sequence[Window]], Tensor]) -> None:
        self._network = network
        self._known: dict[tuple[float, ...] | None, Tensor] = {}

    def __call__(self, windows: Sequence[Window]) -> list[Tensor]:
        kept = set(self._known)
        unknown: list[Window] = []
        for window in windows:
            if window.constant in kept:
                continue
            unknown.append(window)
            if window.constant is not None and len(kept) < _MAX_CONSTANTS:
                kept.add(window.constant)
        not_kept: list[Tensor] = []
        for window, logits in zip(unknown, self._network(unknown) if unknown else (), strict=True):
            if window.constant in kept:
                # Without the memory of the other windows.
                self._known[window.constant] = logits.clone()
            else:
                not_kept.append(logits)
        in_order = iter(not_kept)
        return [
            self._known[window.constant] if window.constant in kept else next(in_order) for window in windows
        ]


def _windows(
    shape: Sequence[int], size: Sequence[int], overlap: float, placement: WindowPlacement
) -> list[Window]:
    """All windows, by their first plane; along the last axis they change fastest."""
    starts = []
    for length, window in zip(shape, size, strict=True):
        # Windows of one voxel, such as slices, cannot overlap.
        starts.append(list(range(length)) if window == 1 else placement.starts(length, window, overlap))
    windows = []
    for first_plane, *corner in product(*starts):
        box = tuple(slice(start, start + side) for start, side in zip(corner, size[1:], strict=True))
        windows.append(Window(first_plane, box))
    return windows


def _padded(volume: Tensor, size: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]]:
    """A volume of at least the window's size, padded with 0, and the box of the content in it.

    Shape: (channels, planes, *in_plane).
    """
    # Before and after each axis, the last axis first, as `F.pad` takes them.
    pads: list[int] = []
    content: list[slice] = []
    for length, window in zip(volume.shape[1:], size, strict=True):
        missing = max(0, window - length)
        before = missing // 2
        pads = [before, missing - before, *pads]
        content.append(slice(before, before + length))
    padded = F.pad(volume, pads) if any(pads) else volume
    return padded, tuple(content)


def _without(values: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*values[:axis], *values[axis + 1 :])


def _bar(batches: Iterable[Sequence[Window]]) -> Iterable[Sequence[Window]]:
    return track(list(batches), "predicting")


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

    def voxels_in_work(axis: int) -> int:
        voxels = 0
        for window, shape in zip(windows, shapes, strict=True):
            planes = min(window.patch_size[axis], shape[axis])
            voxels += planes * prod(shape) // shape[axis]
        return voxels

    axes = range(len(windows[0].patch_size))
    return min(axes, key=lambda axis: (voxels_in_work(axis), -shapes[0][axis]))


def check_overlap(name: str, overlap: float) -> None:
    """Args: name: of the argument. Raises: ArgumentError: not from 0 to below 1."""
    if not 0 <= overlap < 1:
        raise ArgumentError(name, f" must be at least 0 and below 1, got {overlap}")


def check_batch_size(name: str, batch_size: int) -> None:
    """Args: name: of the argument. Raises: ArgumentError: not a whole number of at least 1."""
    if type(batch_size) is not int or batch_size < 1:
        raise ArgumentError(name, f" must be a whole number of at least 1, got {batch_size}")


def _nonempty_flips(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Sets of axes to flip along, in a fixed order: sums of floats depend on it."""
    for flipped in product((False, True), repeat=len(axes)):
        if any(flipped):
            yield tuple(axis for axis, flip in zip(axes, flipped, strict=True) if flip)
