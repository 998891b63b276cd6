"""The planner: decides every value that the config leaves open, and gives its reason."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from statistics import median
from typing import Any

from medconv.data.preprocessing.fingerprint import Fingerprint
from medconv.data.preprocessing.normalisation import normalisation_for
from medconv.planning import report
from medconv.planning.limits import PlanOverrides, need_size
from medconv.planning.patch_search import MIN_EDGE, PatchSearch, need_axes
from medconv.planning.report import ReportRow
from medconv.planning.spacing import (
    MUCH_LOST,
    SMALL_VIEW,
    across,
    coarser,
    lost_shares,
    median_shape,
    slice_axis,
    target_spacing,
    view_share,
    voxels_kept,
)
from medconv.planning.topology import Budget, Network
from medconv.utils.errors import ArgumentError
from medconv.utils.logging import size_text

log = logging.getLogger(__name__)
# Of a grid, and the network and the patch on it.
_Enough = Callable[[PatchSearch, Network, tuple[int, ...]], bool]


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
) -> Plan:
    """Plan a U-Net, its patches and batches for a dataset; values of `overrides` are not changed.

    Args:
        fingerprint: of the dataset.
        overrides: values that the config sets; None: none.
        budget: memory, precision and size; None: the default.
        modalities: one per channel; None is MRI.
        num_outputs: of the network; None: one per class.
        warns: of a patch beyond the budget, and names a spacing that would show more; False for plans that
            are only compared.
    Raises:
        ValueError: values that do not fit the data or each other, or a budget too small for any patch.
    Source: Isensee et al. 2021, doi:10.1038/s41592-020-01008-z; docs/planning.md has the differences.
    """
    overrides = overrides or PlanOverrides()
    budget = budget or Budget()
    axis = _slice_axis(fingerprint, overrides)
    images = fingerprint if axis is None else across(fingerprint, axis)
    names = normalisation_for(overrides.normalisation, modalities or ("MRI",) * len(fingerprint.intensities))
    num_outputs = num_outputs or len(fingerprint.class_voxels[0])
    choice = _choose(images, overrides, budget, num_outputs, hints=warns)
    search = choice.search
    network = choice.network
    patch = choice.patch
    # slices keep their own spacing
    num_slices = 1 if axis is None else median(shape[axis] for shape in fingerprint.shapes)
    all_voxels = prod(search.median) * num_slices * len(fingerprint.shapes)
    batch, batch_reason = search.batch(network, patch, all_voxels)
    if warns:
        search.warn(network, patch, batch)
        _warn_of_cuts(choice)
    planned = Plan(
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
    )
    grid = choice.grid
    patch_reason = report.patch_reason(network, patch, search.median, grid, overrides)
    rows = [
        ("size", budget.size, budget.size_origin),
        ("dimensions", f"{images.spatial_dims}D", report.dims_reason(fingerprint, axis, overrides)),
        ("spacing", f"{size_text(grid.spacing_mm, 4)} mm", report.spacing_reason(images, overrides, grid)),
        ("patch", f"{size_text(patch, 4)} voxels", patch_reason),
        ("batch", str(batch), batch_reason),
        *report.network_rows(network, patch, search.spacing, overrides),
        ("normalisation", ", ".join(names), report.normalisation_reason(modalities, overrides)),
        report.memory_row(search.gb(network, patch, batch), budget),
    ]
    return replace(planned, rows=tuple(rows))


@dataclass(frozen=True)
class _Choice:
    """What is decided together: the grid, the patch on it, and the network for that patch."""

    search: PatchSearch
    network: Network
    patch: tuple[int, ...]
    grid: report.Grid


def _choose(
    images: Fingerprint, overrides: PlanOverrides, budget: Budget, num_outputs: int, hints: bool
) -> _Choice:
    native_search = _search(images, overrides, budget, num_outputs)
    search = native_search
    network, patch = search.network_and_patch()
    is_fixed = overrides.spacing_mm or overrides.patch_size or overrides.resize
    coarsens = need_size(budget.size).coarsens and not is_fixed and not overrides.image_level
    if coarsens:
        search, network, patch = _coarsened(search, images, network, patch, _sees(1))
    elif overrides.image_level and not is_fixed:
        # whole images have no smaller patch, so their grid becomes coarser in every size
        search, network, patch = _held(search, images, network, patch)
    takes_median = overrides.image_level and not overrides.patch_size and not overrides.resize
    view = view_share(patch, search.median)
    is_bounded = coarsens and view < 1 and coarser(search.spacing, images.thickness_mm, view) is None
    wider_spacing = None
    if hints and view < SMALL_VIEW:
        no_structures = replace(images, thickness_mm=())
        wider_search, _, _ = _coarsened(search, no_structures, network, patch, _sees(SMALL_VIEW))
        wider_spacing = wider_search.spacing if wider_search.spacing != search.spacing else None
    grid = report.Grid(
        spacing_mm=search.spacing,
        native_spacing_mm=native_search.spacing,
        view_share=view,
        is_bounded=is_bounded,
        voxels_kept=voxels_kept(search.spacing, native_search.spacing, images.thickness_mm),
        wider_spacing_mm=wider_spacing,
        lost_shares=lost_shares(images, search.spacing, patch) if takes_median else (),
    )
    return _Choice(search, network, patch, grid)


def _warn_of_cuts(choice: _Choice) -> None:
    """Of images that are so much larger than the median that what counts may lie outside."""
    lost = choice.grid.lost_shares
    if max(lost, default=0) <= MUCH_LOST:
        return
    log.warning(
        "%s: the network takes %s voxels, as many as the median image has; %s scales all images to one size",
        report.cut_text(lost),
        size_text(choice.patch, 4),
        choice.search.overrides.name("resize"),
    )


def _slice_axis(fingerprint: Fingerprint, overrides: PlanOverrides) -> int | None:
    """The axis across which a 2D network takes slices; None: it takes whole images.

    Raises: ArgumentError: dimensions that the images do not have.
    """
    if not overrides.image_level:
        return slice_axis(fingerprint, overrides.spatial_dims, overrides.slice_axis)
    if overrides.spatial_dims not in (None, fingerprint.spatial_dims):
        raise ArgumentError(
            "spatial_dims",
            f" must be {fingerprint.spatial_dims} or null, as the network takes whole images and these are "
            f"{fingerprint.spatial_dims}D, got {overrides.spatial_dims}",
        )
    return None


def _search(images: Fingerprint, overrides: PlanOverrides, budget: Budget, num_outputs: int) -> PatchSearch:
    """The search on the grid that the config sets, or else on that of the images."""
    spacing = target_spacing(images)
    if overrides.spacing_mm:
        spacing = tuple(float(mm) for mm in overrides.spacing_mm)
    need_axes("spacing_mm", spacing, images.spatial_dims)
    shape = median_shape(images, spacing)
    if overrides.resize is not None:
        need_axes("resize", overrides.resize, images.spatial_dims)
        if not overrides.spacing_mm:  # what the network sees
            axes = zip(spacing, shape, overrides.resize, strict=True)
            spacing = tuple(mm * edge / resized_edge for mm, edge, resized_edge in axes)
        shape = tuple(overrides.resize)
    return PatchSearch(
        spacing=spacing,
        median=shape,
        overrides=overrides,
        budget=budget,
        num_channels=len(images.intensities),
        num_classes=num_outputs,
    )


def _coarsened(
    search: PatchSearch, images: Fingerprint, network: Network, patch: tuple[int, ...], is_enough: _Enough
) -> tuple[PatchSearch, Network, tuple[int, ...]]:
    """The finest grid that is coarse enough.

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


def _held(
    search: PatchSearch, images: Fingerprint, network: Network, patch: tuple[int, ...]
) -> tuple[PatchSearch, Network, tuple[int, ...]]:
    """The finest grid on which the size's share of memory holds whole images, or else all of the memory.

    All of it where weights, a batch that is set or the padding for strides leave too little of the share.
    Raises: ValueError: memory holds no image.
    """
    limits = [search.memory_gb, search.budget.memory_gb]
    for memory_gb in limits[-1:] if search.overrides.batch_size else limits:
        held, held_network, held_patch = _coarsened(search, images, network, patch, _holds(memory_gb))
        if held.holds(held_network, held_patch, memory_gb):
            return held, held_network, held_patch
    raise held.too_small(held_network, held_patch, held.least_batch)


def _holds(memory_gb: float) -> _Enough:
    """Whether this memory holds whole images, or they cannot reasonably be smaller."""
    return lambda search, network, patch: (
        search.holds(network, patch, memory_gb) or max(search.median) <= MIN_EDGE
    )


def _sees(share: float) -> _Enough:
    """Whether a patch covers this share of the median image's voxels."""
    return lambda search, network, patch: view_share(patch, search.median) >= share
