"""The planner: decides every value that the config leaves open, and gives its reason.

`plan` takes the images' grid, or a coarser one; on each grid a `PatchSearch` looks for a network, a patch and
a batch that fit the memory there is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from statistics import median
from typing import Any, Self

from medconv.data.preprocessing.fingerprint import Fingerprint
from medconv.data.preprocessing.normalisation import normalisation_for
from medconv.planning import report, topology
from medconv.planning.limits import PlanOverrides, Size, need_size
from medconv.planning.report import ReportRow
from medconv.planning.spacing import (
    SMALL_VIEW,
    across,
    coarser,
    median_shape,
    slice_axis,
    target_spacing,
    view_share,
    voxels_kept,
)
from medconv.planning.topology import GB, Budget, Network, rounded_up, step_bytes
from medconv.utils.errors import Argument, ArgumentError
from medconv.utils.logging import size_text

MIN_EDGE = 16  # voxels; no axis of a patch is made smaller
_MIN_BATCH = 2  # norms and the Dice loss need more than one sample
_DATA_SHARE = 0.05  # largest share of all voxels in one batch; nnU-Net's rule against overfitting

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """The values to build data, network and batches from; axes: those of the network.

    Args:
        slice_axis: across the slices that a 2D network takes from volumes, else None.
        patch_size: voxels at `spacing_mm`. batch_size: per device. normalisation: one name per channel.
        strides, kernel_sizes, channels: of the network's stages, as in `Network`.
        memory_gb, size: the budget. rows: (what, value, reason), for people.
    """

    spatial_dims: int
    slice_axis: int | None
    spacing_mm: tuple[float, ...]
    patch_size: tuple[int, ...]
    batch_size: int
    strides: tuple[tuple[int, ...], ...]
    kernel_sizes: tuple[tuple[int, ...], ...]
    channels: tuple[int, ...]
    normalisation: tuple[str, ...]
    memory_gb: float
    size: str
    rows: tuple[ReportRow, ...] = field(default=(), compare=False, repr=False)

    def values(self) -> dict[str, Any]:
        """Everything but `rows`."""
        return {key: value for key, value in asdict(self).items() if key != "rows"}


def plan(
    fingerprint: Fingerprint,
    overrides: PlanOverrides | None = None,
    budget: Budget | None = None,
    modalities: Sequence[str] | None = None,
    num_outputs: int | None = None,
    warns: bool = True,
    kind: type[PatchSearch] | None = None,
    of_pictures: str = "dataset",
) -> Plan:
    """Plan a U-Net, its patches and batches for a dataset; values of `overrides` are not changed.

    Args:
        overrides: values that the config sets; None: none.
        budget: memory, precision and size; None: the default.
        modalities: one per channel; None is MRI.
        num_outputs: of the network; None: one per class.
        warns: of a patch beyond the budget, and names a spacing that would show more; False for plans that
            are only compared.
        kind: of the search on a grid; None: `PatchSearch`, for patches.
        of_pictures: normalisation of pictures, where the config sets none.
    Raises:
        ValueError: values that do not fit the data or each other, or a budget too small for any patch.
    Source: Isensee et al. 2021, doi:10.1038/s41592-020-01008-z; docs/planning.md has the differences.
    """
    overrides = overrides or PlanOverrides()
    budget = budget or Budget()
    kind = kind or PatchSearch
    # A 2D network takes slices of volumes; they keep their own spacing.
    axis = kind.slice_axis(fingerprint, overrides)
    images = fingerprint if axis is None else across(fingerprint, axis)
    modalities = modalities or ("MRI",) * len(fingerprint.intensities)
    names = normalisation_for(overrides.normalisation, modalities, of_pictures)
    num_outputs = num_outputs or len(fingerprint.class_voxels[0])
    # Grid, patch and network are decided together.
    native_search = kind.on_images(images, overrides, budget, num_outputs)
    search, network, patch = native_search.settled(images)
    grid = _grid(search, network, patch, images, native_search.spacing, hints=warns)
    num_slices = 1 if axis is None else median(shape[axis] for shape in fingerprint.shapes)
    all_voxels = prod(search.median) * num_slices * len(fingerprint.shapes)
    batch, batch_reason = search.batch(network, patch, all_voxels)
    needed_gb = search.gb(network, patch, batch)
    # A patch size that the user sets is not changed.
    if warns and needed_gb > budget.memory_gb:
        log.warning(
            "patch_size=[%s] in a batch of %d takes about %g GB, the budget is %g GB (%s)",
            ",".join(map(str, patch)),
            batch,
            float(f"{needed_gb:.2g}"),
            budget.memory_gb,
            budget.origin,
        )
    for doubt in search.doubts(images, patch) if warns else ():
        log.warning("%s", doubt)
    return Plan(
        spatial_dims=images.spatial_dims,
        slice_axis=axis,
        spacing_mm=search.spacing,
        patch_size=patch,
        batch_size=batch,
        strides=network.strides,
        kernel_sizes=network.kernel_sizes,
        channels=network.channels,
        normalisation=names,
        memory_gb=float(budget.memory_gb),
        size=budget.size,
        rows=(
            ("size", budget.size, budget.size_origin),
            ("dimensions", f"{images.spatial_dims}D", report.dims_reason(fingerprint, axis, overrides)),
            *search.grid_rows(images, network, patch, grid),
            ("batch", str(batch), batch_reason),
            *report.network_rows(network, patch, search.spacing, overrides),
            *report.last_rows(names, modalities, needed_gb, budget, overrides),
        ),
    )


def _grid(
    search: PatchSearch,
    network: Network,
    patch: tuple[int, ...],
    images: Fingerprint,
    native_mm: tuple[float, ...],
    hints: bool,
) -> report.Grid:
    """What the plan's table says of the grid. Args: hints: look for a spacing that would show more."""
    view = view_share(patch, search.median)
    is_bounded = search.coarsens and view < 1 and coarser(search.spacing, images.thickness_mm, view) is None
    wider_spacing = None
    if hints and view < SMALL_VIEW:
        # the grid on which a patch would see enough, if structures could be lost
        no_structures = replace(images, thickness_mm=())
        wider_search, _, _ = coarsened(
            search,
            no_structures,
            network,
            patch,
            lambda on, _, seen: view_share(seen, on.median) >= SMALL_VIEW,
        )
        wider_spacing = wider_search.spacing if wider_search.spacing != search.spacing else None
    kept = None
    if search.spacing != native_mm:
        kept = voxels_kept(search.spacing, native_mm, images.thickness_mm)
    return report.Grid(
        spacing_mm=search.spacing,
        native_spacing_mm=native_mm,
        view_share=view,
        is_bounded=is_bounded,
        voxels_kept=kept,
        wider_spacing_mm=wider_spacing,
    )


def coarsened(
    search: PatchSearch,
    images: Fingerprint,
    network: Network,
    patch: tuple[int, ...],
    is_enough: Callable[[PatchSearch, Network, tuple[int, ...]], bool],
) -> tuple[PatchSearch, Network, tuple[int, ...]]:
    """The finest grid that is coarse enough, by the network and the patch on it.

    As far as the thinnest structure allows, and the values of the config, such as channels for more stages
    than a coarser grid has.
    """
    while not is_enough(search, network, patch):
        view = view_share(patch, search.median)
        spacing = coarser(search.spacing, images.thickness_mm, view)
        if spacing is None:
            break
        coarser_search = replace(search, spacing=spacing, median=median_shape(images, spacing))
        try:
            network, patch = coarser_search.network_and_patch()
        except ArgumentError:
            break
        search = coarser_search
    return search, network, patch


@dataclass(frozen=True)
class PatchSearch:
    """The search of a patch on one grid.

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
    def size(self) -> Size:
        """The limits of the budget's size."""
        return need_size(self.budget.size)

    @property
    def min_batch(self) -> int:
        """The least batch that is planned."""
        return min(_MIN_BATCH, self.overrides.max_batch_size or _MIN_BATCH)

    @staticmethod
    def slice_axis(fingerprint: Fingerprint, overrides: PlanOverrides) -> int | None:
        """The axis across which a 2D network takes slices of volumes; None: it takes none.

        Raises: ArgumentError: values that the images do not allow.
        """
        if overrides.resize is not None:
            raise ArgumentError(
                "resize", " needs cases with values; label maps keep mm, by ", Argument("spacing_mm")
            )
        return slice_axis(fingerprint, overrides.spatial_dims, overrides.slice_axis)

    @classmethod
    def on_images(
        cls, images: Fingerprint, overrides: PlanOverrides, budget: Budget, num_outputs: int
    ) -> Self:
        """On the grid that the config sets, or else on that of the images."""
        spacing = target_spacing(images)
        if overrides.spacing_mm is not None:
            spacing = tuple(float(mm) for mm in overrides.spacing_mm)
            need_axes("spacing_mm", spacing, images.spatial_dims)
        return cls(
            spacing=spacing,
            median=median_shape(images, spacing),
            overrides=overrides,
            budget=budget,
            num_channels=len(images.intensities),
            num_classes=num_outputs,
        )

    @property
    def coarsens(self) -> bool:
        """Whether the grid becomes coarser until a patch covers the median image."""
        is_fixed = self.overrides.spacing_mm or self.overrides.patch_size
        return self.size.coarsens and not is_fixed

    def settled(self, images: Fingerprint) -> tuple[PatchSearch, Network, tuple[int, ...]]:
        """The search on the grid to take, with network and patch. Raises: as `network_and_patch`."""
        network, patch = self.network_and_patch()
        if not self.coarsens:
            return self, network, patch
        return coarsened(self, images, network, patch, lambda on, _, seen: view_share(seen, on.median) >= 1)

    def doubts(self, images: Fingerprint, patch: Sequence[int]) -> list[str]:
        """What a plan warns of."""
        return []

    def grid_rows(
        self, images: Fingerprint, network: Network, patch: Sequence[int], grid: report.Grid
    ) -> list[ReportRow]:
        """Spacing and patch with their reasons."""
        return report.grid_rows(images, network, patch, self.median, grid, self.overrides, self.size)

    def most_samples(self, patch: Sequence[int]) -> int:
        """The largest batch, since short runs need many steps."""
        return self.size.max_batch[len(self.spacing)]

    def gb(self, network: Network, patch: Sequence[int], batch: int) -> float:
        return step_bytes(network, patch, batch, self.num_channels, self.num_classes, self.budget) / GB

    def network_and_patch(self) -> tuple[Network, tuple[int, ...]]:
        """The largest patch for which a batch fits: the median image, its axes reduced in turn.

        Raises: ValueError: not even the smallest patch fits.
        """
        if self.overrides.patch_size is not None:
            patch = tuple(self.overrides.patch_size)
            need_axes("patch_size", patch, len(self.spacing))
            return self.network_for(patch, exact=True)
        batch_size = self.overrides.batch_size
        share_gb = self.budget.memory_gb * self.size.memory_share
        batches = [batch_size] if batch_size else sorted({self.min_batch, 1}, reverse=True)
        for batch in batches:
            # the largest patch whose batch takes the size's share of the budget, or else the smallest patch
            network, patch = self.network_for(topology.largest_patch(self.median, self.spacing))
            while self.gb(network, patch, batch) > share_gb:
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

    def network_for(self, patch: Sequence[int], exact: bool = False) -> tuple[Network, tuple[int, ...]]:
        """The network for a patch, and the patch rounded up to a multiple of its strides.

        Args:
            exact: the patch must be such a multiple already.
        """
        overrides = self.overrides
        dims = len(self.spacing)
        if overrides.strides is not None:
            strides = topology.need_strides(overrides.strides, dims)
        else:
            # halvings for as many stages as the config's lists have values; an empty list is no limit here,
            # it is refused where the list is read
            per_stage = [getattr(overrides, name) for name in topology.PER_STAGE]
            limits = [len(values) for values in per_stage if isinstance(values, (list, tuple))]
            most = min((limit for limit in (*limits, overrides.max_stages or 0) if limit > 0), default=None)
            strides = topology.halvings(patch, self.spacing, exact, most)
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
            kernel_sizes = topology.need_kernels(overrides.kernel_sizes, num_stages, dims)
        channels = topology.widths(num_stages, dims, self.size)
        if overrides.channels is not None:
            channels = topology.need_channels(overrides.channels, num_stages)
        encoder_convs = decoder_convs = topology.need_convs(overrides.convs_per_stage, num_stages)
        if overrides.residual_blocks is not None:
            encoder_convs = topology.encoder_convs(overrides.residual_blocks, num_stages)
        network = Network(
            strides=strides,
            kernel_sizes=kernel_sizes,
            channels=channels,
            encoder_convs=encoder_convs,
            decoder_convs=decoder_convs,
            divisible_by=overrides.divisible_by,
        )
        rounded = rounded_up(patch, network.divisor())
        if exact and rounded != tuple(patch):
            multiple = overrides.divisible_by
            raise ArgumentError(
                "patch_size",
                f" must be divisible by {network.divisor()} (",
                Argument("strides" if multiple == 1 else "divisible_by"),
                "" if multiple == 1 else f"={multiple}",
                f"), got {list(patch)}",
            )
        return network, rounded

    def _smaller(self, patch: Sequence[int]) -> tuple[Network, tuple[int, ...]] | None:
        """The next smaller patch along the axis that covers most of the median image; None if none fits."""
        # the axis that covers the largest share of the median image first; of equal ones the first
        axes = sorted(range(len(self.spacing)), key=lambda axis: (-patch[axis] / self.median[axis], axis))
        for axis in axes:
            for edge in range(patch[axis] - 1, MIN_EDGE - 1, -1):
                cut_patch = (*patch[:axis], edge, *patch[axis + 1 :])
                try:
                    network, rounded = self.network_for(cut_patch)
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
        batch_size, most = self.overrides.batch_size, self.overrides.max_batch_size
        if batch_size is not None and most is not None and batch_size > most:
            raise ArgumentError(
                "batch_size", f"={batch_size}: ", Argument("max_batch_size"), f" allows {most}"
            )
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
        else:
            limits["short runs need many steps"] = self.most_samples(patch)
        if limits["memory"] < self.min_batch:
            return 1, "memory holds no more"
        reason = min(limits, key=lambda name: limits[name])
        if limits[reason] < self.min_batch:
            return self.min_batch, f"the minimum, above a limit ({reason}: {limits[reason]})"
        other_limits = ", ".join(f"{name}: {limit}" for name, limit in limits.items() if name != reason)
        return limits[reason], f"{reason}; other limits: {other_limits}"


def need_axes(name: str, values: Sequence[float], spatial_dims: int) -> None:
    """Raises: ArgumentError: not a positive number per spatial axis."""
    if len(values) != spatial_dims or any(not 0 < v < float("inf") for v in values):
        needed = f"{spatial_dims} positive numbers, one per spatial axis"
        raise ArgumentError(name, f" needs {needed}, got {list(values)}")
