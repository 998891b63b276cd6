"""The plan of a network that takes whole images of one size: their grid, and the size of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import log2, prod, sqrt
from typing import Self

import numpy as np

from medconv.data.preprocessing.fingerprint import Fingerprint
from medconv.planning import report
from medconv.planning.limits import PlanOverrides
from medconv.planning.planner import MIN_EDGE, PatchSearch, coarsened, need_axes
from medconv.planning.topology import Budget, Network
from medconv.utils.errors import ArgumentError
from medconv.utils.logging import size_text

MUCH_LOST = 0.25  # share of an axis of an image, of which a warning tells if it is cut off
_BATCH_ROOT = 4700  # samples of a batch: this, divided by the root of an image's voxels
_Found = tuple[PatchSearch, Network, tuple[int, ...]]


class WholeImages(PatchSearch):
    """The search of the grid on which memory holds whole images; as `Family.planning`."""

    @staticmethod
    def slice_axis(fingerprint: Fingerprint, overrides: PlanOverrides) -> int | None:
        if overrides.slice_axis is not None:
            raise ArgumentError("slice_axis", " is for label maps; the network takes whole images")
        if overrides.spatial_dims not in (None, fingerprint.spatial_dims):
            raise ArgumentError(
                "spatial_dims",
                f" must be {fingerprint.spatial_dims} or null, as the network takes whole images and these "
                f"are {fingerprint.spatial_dims}D, got {overrides.spatial_dims}",
            )
        if overrides.resize is not None and any(n < 1 for n in overrides.resize):
            raise ArgumentError("resize", f" needs positive numbers of voxels, got {list(overrides.resize)}")
        return None

    @classmethod
    def on_images(
        cls, images: Fingerprint, overrides: PlanOverrides, budget: Budget, num_outputs: int
    ) -> Self:
        search = super().on_images(images, overrides, budget, num_outputs)
        if overrides.resize is None:
            return search
        need_axes("resize", overrides.resize, images.spatial_dims)
        spacing = search.spacing
        if not overrides.spacing_mm:  # what the network sees
            axes = zip(spacing, search.median, overrides.resize, strict=True)
            spacing = tuple(mm * edge / resized_edge for mm, edge, resized_edge in axes)
        return replace(search, spacing=spacing, median=tuple(overrides.resize))

    @property
    def coarsens(self) -> bool:
        return False

    def settled(self, images: Fingerprint) -> _Found:
        network, patch = self.network_and_patch()
        if self.overrides.spacing_mm or self.overrides.patch_size or self.overrides.resize:
            return self, network, patch
        # whole images have no smaller patch, so their grid becomes coarser in every size
        return self._held(images, network, patch)

    def network_and_patch(self) -> tuple[Network, tuple[int, ...]]:
        if self.overrides.patch_size is not None:
            return super().network_and_patch()
        return self.network_for(self.median)

    def most_samples(self, patch: Sequence[int]) -> int:
        """A power of two from 2 to 128, such as 128 pictures of 28 x 28, or 16 of 224 x 224."""
        batch = 2 ** round(log2(_BATCH_ROOT / sqrt(prod(patch))))
        return int(min(128, max(2, batch)))

    def doubts(self, images: Fingerprint, patch: Sequence[int]) -> list[str]:
        """Images that are so much larger than the median that what counts may lie outside."""
        lost = self._lost_shares(images, patch)
        if max(lost, default=0) <= MUCH_LOST:
            return []
        return [
            f"{_cut_text(lost)}: the network takes {size_text(patch, 4)} voxels, as many as the median image "
            f"has; {self.overrides.name('resize')} scales all images to one size"
        ]

    def grid_rows(
        self, images: Fingerprint, network: Network, patch: Sequence[int], grid: report.Grid
    ) -> list[report.ReportRow]:
        of_grid, of_patch = super().grid_rows(images, network, patch, grid)
        spacing_reason = of_grid[2]
        patch_reason = of_patch[2]
        overrides = self.overrides
        up_to = report.up_to(overrides)
        median_size = size_text(self.median, 4)
        resized = overrides.resize is not None
        if resized and overrides.spacing_mm is None:
            spacing_reason = f"the median of {len(images.shapes)} cases, scaled by {overrides.name('resize')}"
        elif grid.spacing_mm != grid.native_spacing_mm:
            spacing_reason = report.coarser_reason(grid, "memory holds whole images")
        if resized and overrides.patch_size is None:
            patch_reason = f"{overrides.name('resize')}, {median_size}, padded {up_to}"
        elif overrides.patch_size is None:
            cut = _cut_text(self._lost_shares(images, patch))
            patch_reason = f"the median image, {median_size}, rounded up {up_to}"
            patch_reason += f"; {cut}" if cut else ""
        return [(*of_grid[:2], spacing_reason), (*of_patch[:2], patch_reason)]

    def _lost_shares(self, images: Fingerprint, patch: Sequence[int]) -> list[float]:
        """Per image the largest share of an axis that is cut off, if the config does not ask for it."""
        if self.overrides.patch_size or self.overrides.resize:
            return []
        shapes = (np.array(images.shapes) * np.array(images.spacings_mm) / np.array(self.spacing)).round()
        lost = 1 - np.array(patch) / np.maximum(shapes, 1)
        return [float(share) for share in lost.max(axis=1).clip(min=0)]

    def _held(self, images: Fingerprint, network: Network, patch: tuple[int, ...]) -> _Found:
        """The finest grid on which the size's share of memory holds whole images, or else all of the memory.

        All of it where weights, a batch that is set or the padding for strides leave too little of the share.
        Raises: ValueError: memory holds no image.
        """
        limits = [self.budget.memory_gb * self.size.memory_share, self.budget.memory_gb]
        least_batch = self.overrides.batch_size or self.min_batch
        for memory_gb in limits[-1:] if self.overrides.batch_size else limits:
            is_enough = partial(_holds_or_tiny, memory_gb, least_batch)
            held, held_network, held_patch = coarsened(self, images, network, patch, is_enough)
            if held.gb(held_network, held_patch, least_batch) <= memory_gb:
                return held, held_network, held_patch
        raise held.too_small(held_network, held_patch, least_batch)


def _holds_or_tiny(
    memory_gb: float, batch: int, search: PatchSearch, network: Network, patch: Sequence[int]
) -> bool:
    """Whether this memory holds whole images, or they cannot reasonably be smaller."""
    return search.gb(network, patch, batch) <= memory_gb or max(search.median) <= MIN_EDGE


def _cut_text(lost_shares: Sequence[float]) -> str:
    """How many images are cut, and how much of them; empty if none is."""
    if not any(lost_shares):
        return ""
    num_cut = sum(share > 0 for share in lost_shares)
    percent = report.percent(max(lost_shares))
    return f"{num_cut} of {len(lost_shares)} images are cut at their borders, by up to {percent} % of an axis"
