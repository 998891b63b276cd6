"""The search for a network, a patch and a batch that fit the memory there is."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, prod, sqrt

from medconv.planning import topology
from medconv.planning.limits import PlanOverrides, Size, need_size
from medconv.planning.topology import GB, Budget, Network, rounded_up, step_bytes
from medconv.utils.errors import Argument, ArgumentError
from medconv.utils.logging import size_text

MIN_EDGE = 16  # voxels; no axis of a patch is made smaller
_MIN_BATCH = 2  # norms and the Dice loss need more than one sample
_DATA_SHARE = 0.05  # largest share of all voxels in one batch; nnU-Net's rule against overfitting
_IMAGE_LEVEL_ROOT = 4700  # image-level batch size: this, divided by the root of an image's voxels

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PatchSearch:
    """The search on one grid.

    Args:
        spacing: of the grid, mm.
        median: shape of the median image on it, voxels.
        overrides: values that the config sets.
        budget: memory, precision and size.
    """

    spacing: tuple[float, ...]
    median: tuple[int, ...]
    overrides: PlanOverrides
    budget: Budget
    num_channels: int
    num_classes: int

    @property
    def dims(self) -> int:
        return len(self.spacing)

    @property
    def size(self) -> Size:
        return need_size(self.budget.size)

    @property
    def memory_gb(self) -> float:
        """The size's share of the budget."""
        return self.budget.memory_gb * self.size.memory_share

    @property
    def min_batch(self) -> int:
        return min(_MIN_BATCH, self.overrides.max_batch_size or _MIN_BATCH)

    def gb(self, network: Network, patch: Sequence[int], batch: int) -> float:
        return step_bytes(network, patch, batch, self.num_channels, self.num_classes, self.budget) / GB

    def network_and_patch(self) -> tuple[Network, tuple[int, ...]]:
        """The largest patch for which a batch fits: the median image, its axes reduced in turn.

        Raises: ValueError: not even the smallest patch fits.
        """
        if self.overrides.patch_size is not None:
            patch = tuple(self.overrides.patch_size)
            need_axes("patch_size", patch, self.dims)
            return self._network_for(patch, exact=True)
        if self.overrides.image_level:
            return self._network_for(self.median)
        batch_size = self.overrides.batch_size
        batches = [batch_size] if batch_size else sorted({self.min_batch, 1}, reverse=True)
        for batch in batches:
            # the largest patch whose batch takes the size's share of the budget, or else the smallest patch
            network, patch = self._network_for(topology.largest_patch(self.median, self.spacing))
            while self.gb(network, patch, batch) > self.memory_gb:
                smaller = self._smaller(patch)
                if smaller is None:
                    break
                network, patch = smaller
            if self.gb(network, patch, batch) <= self.budget.memory_gb:
                return network, patch
        raise self.too_small(network, patch, batch)

    def too_small(self, network: Network, patch: Sequence[int], batch: int) -> ArgumentError:
        """The error of a budget that does not hold the smallest patch."""
        gb = self.gb(network, patch, batch)
        return ArgumentError(
            "memory_gb",
            f": the smallest patch, {size_text(patch, 4)} voxels, in a batch of {batch} takes about "
            f"{float(f'{gb:.2g}'):g} GB, the budget is {self.budget.memory_gb:g} GB ({self.budget.origin}); "
            "try perf=memory, a smaller ",
            Argument("batch_size"),
            " or fewer ",
            Argument("channels"),
        )

    @property
    def least_batch(self) -> int:
        """The batch that the config sets, or the smallest one that is planned."""
        return self.overrides.batch_size or self.min_batch

    def holds(self, network: Network, patch: Sequence[int], memory_gb: float) -> bool:
        """Whether this memory holds the least batch."""
        return self.gb(network, patch, self.least_batch) <= memory_gb

    def _network_for(self, patch: Sequence[int], exact: bool = False) -> tuple[Network, tuple[int, ...]]:
        """The network for a patch, and the patch rounded up to a multiple of its strides.

        Args:
            exact: the patch must be such a multiple already.
        """
        overrides = self.overrides
        strides = self._strides(patch, exact)
        num_stages = len(strides) + 1
        if overrides.max_stages is not None and num_stages > overrides.max_stages:
            raise ArgumentError(
                "strides",
                f"={overrides.strides} makes {num_stages} stages, ",
                Argument("max_stages"),
                f" allows {overrides.max_stages}",
            )
        kernel_sizes = topology.kernels(self.spacing, strides)
        if overrides.kernel_sizes is not None:
            kernel_sizes = topology.need_kernels(overrides.kernel_sizes, num_stages, self.dims)
        channels = topology.widths(num_stages, self.dims, self.size)
        if overrides.channels is not None:
            channels = topology.need_channels(overrides.channels, num_stages)
        encoder_convs = None
        if overrides.residual_blocks is not None:
            encoder_convs = topology.encoder_convs(overrides.residual_blocks, num_stages)
        network = Network(
            strides=strides,
            kernel_sizes=kernel_sizes,
            channels=channels,
            encoder_convs=encoder_convs,
            decoder_convs=overrides.decoder_convs,
            divisible_by=overrides.divisible_by,
        )
        rounded = rounded_up(patch, network.divisor(self.dims))
        if exact and rounded != tuple(patch):
            multiple = overrides.divisible_by
            raise ArgumentError(
                "patch_size",
                f" must be divisible by {network.divisor(self.dims)} (",
                Argument("strides" if multiple == 1 else "divisible_by"),
                "" if multiple == 1 else f"={multiple}",
                f"), got {list(patch)}",
            )
        return network, rounded

    def _strides(self, patch: Sequence[int], exact: bool) -> topology.Steps:
        """Those of the config, or else halvings for as many stages as its lists have values."""
        overrides = self.overrides
        if overrides.strides is not None:
            return topology.need_strides(overrides.strides, self.dims)
        per_stage = (overrides.channels, overrides.kernel_sizes, overrides.residual_blocks)
        limits = [len(values) for values in per_stage if isinstance(values, (list, tuple))]
        if overrides.max_stages is not None:
            limits.append(overrides.max_stages)
        # an empty list is no limit here; it is refused where the list is read
        max_stages = min((limit for limit in limits if limit > 0), default=None)
        return topology.halvings(patch, self.spacing, exact, max_stages)

    def _smaller(self, patch: Sequence[int]) -> tuple[Network, tuple[int, ...]] | None:
        """The next smaller patch along the axis that covers most of the median image; None if none fits."""
        # the axis that covers the largest share of the median image first; of equal ones the first
        axes = sorted(range(self.dims), key=lambda axis: (-patch[axis] / self.median[axis], axis))
        for axis in axes:
            for edge in range(patch[axis] - 1, MIN_EDGE - 1, -1):
                cut_patch = (*patch[:axis], edge, *patch[axis + 1 :])
                try:
                    network, rounded = self._network_for(cut_patch)
                except ValueError:  # too small for as many stages as channels or kernel_sizes have
                    break
                if rounded[axis] < patch[axis] and prod(rounded) < prod(patch):
                    return network, rounded
        return None

    def batch(self, network: Network, patch: Sequence[int], voxels: float) -> tuple[int, str]:
        """Batch size, and the reason.

        Args:
            voxels: of all cases.
        """
        if self.overrides.batch_size is not None:
            return self.overrides.batch_size, self.overrides.name("batch_size")
        first_gb = self.gb(network, patch, 1)
        sample_gb = self.gb(network, patch, 2) - first_gb  # of each further sample
        limits = {
            "memory": int((self.budget.memory_gb - first_gb) // sample_gb) + 1,
            f"{100 * _DATA_SHARE:g} % of all voxels": round(_DATA_SHARE * voxels / prod(patch)),
        }
        if self.overrides.max_batch_size is not None:
            limits[self.overrides.name("max_batch_size")] = self.overrides.max_batch_size
        elif self.overrides.image_level:
            limits["short runs need many steps"] = _image_level_batch(patch)
        else:
            limits["short runs need many steps"] = self.size.max_batch[self.dims]
        if limits["memory"] < self.min_batch:
            return 1, "memory holds no more"
        reason = min(limits, key=lambda name: limits[name])
        if limits[reason] < self.min_batch:
            return self.min_batch, f"the minimum ({reason} would allow {limits[reason]})"
        other_limits = ", ".join(f"{name}: {limit}" for name, limit in limits.items() if name != reason)
        return limits[reason], f"{reason}; other limits: {other_limits}"

    def warn(self, network: Network, patch: Sequence[int], batch: int) -> None:
        """Warn if a step does not fit: a patch size that the user sets is not changed."""
        needed_gb = self.gb(network, patch, batch)
        if needed_gb > self.budget.memory_gb:
            log.warning(
                "patch_size=[%s] in a batch of %d takes about %g GB, the budget is %g GB (%s)",
                ",".join(map(str, patch)),
                batch,
                float(f"{needed_gb:.2g}"),
                self.budget.memory_gb,
                self.budget.origin,
            )


def _image_level_batch(patch: Sequence[int]) -> int:
    """A power of two from 2 to 128: 128 pictures of 28 x 28, 32 volumes of 28 x 28 x 28, 16 of 224 x 224."""
    batch = 2 ** round(log2(_IMAGE_LEVEL_ROOT / sqrt(prod(patch))))
    return int(min(128, max(2, batch)))


def need_axes(name: str, values: Sequence[float], spatial_dims: int) -> None:
    """Raises: ArgumentError: not a positive number per spatial axis."""
    if len(values) != spatial_dims or any(not 0 < v < float("inf") for v in values):
        needed = f"{spatial_dims} positive numbers, one per spatial axis"
        raise ArgumentError(name, f" needs {needed}, got {list(values)}")
