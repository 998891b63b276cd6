"""The plan as a table: each value with its reason."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf, prod

from medconv.data.preprocessing.fingerprint import Fingerprint
from medconv.planning.limits import PlanOverrides, Size
from medconv.planning.spacing import SMALL_VIEW, thick_axis, voxels_to_keep
from medconv.planning.topology import EVEN, MIN_EDGE, PER_STAGE, Budget, Network, largest_patch, rounded_up
from medconv.utils.logging import size_text

_WIDTH = 90  # columns of a terminal
_AXES = ("right", "anterior", "superior")
ReportRow = tuple[str, str, str]


@dataclass(frozen=True)
class Grid:
    """The grid of a plan.

    Args:
        native_spacing_mm: that of the images, which `spacing_mm` may be coarser than.
        view_share: share of the median image's voxels that a patch covers.
        is_bounded: a coarser grid would not keep the thinnest structure.
        voxels_kept: across the thinnest structure, along the axes that became coarser; None: there are none.
        wider_spacing_mm: on which a patch would show more, of ever coarser ones the first that shows enough;
            None: the config's values do not allow any, or the patch shows enough already.
    """

    spacing_mm: tuple[float, ...]
    native_spacing_mm: tuple[float, ...]
    view_share: float
    is_bounded: bool = False
    voxels_kept: float | None = None
    wider_spacing_mm: tuple[float, ...] | None = None


def table(rows: Sequence[ReportRow]) -> str:
    """For each value: its name, the value, the reason; a long reason goes on below itself."""
    name_width = max(len(name) for name, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    margin = " " * (name_width + value_width + 4)
    width = max(_WIDTH, len(margin) + 30)  # room for the reasons beside long values
    lines = []
    for name, value, reason in rows:
        line = textwrap.fill(
            reason,
            width,
            initial_indent=f"{name:<{name_width}}  {value:<{value_width}}  ",
            subsequent_indent=margin,
            drop_whitespace=True,
        )
        lines.append(line)
    return "\n".join(lines)


def grid_rows(
    images: Fingerprint,
    network: Network,
    patch: Sequence[int],
    median: Sequence[int],
    grid: Grid,
    overrides: PlanOverrides,
    size: Size,
) -> list[ReportRow]:
    """Spacing and patch. Args: median: the median image's voxels."""
    if overrides.spacing_mm is not None:
        spacing_reason = overrides.name("spacing_mm")
    elif grid.spacing_mm != grid.native_spacing_mm:
        use = f"a patch covers {percent(grid.view_share)} % of the median image"
        spacing_reason = coarser_reason(grid, use)
    else:
        across_slices = "" if thick_axis(images) is None else "; across the thick slices the 10th percentile"
        spacing_reason = f"the median of {len(images.shapes)} cases{across_slices}"
    median_size = size_text(median, 4)
    hint = _view_hint(grid, overrides) if grid.view_share < SMALL_VIEW else ""
    if overrides.patch_size is not None:
        patch_reason = f"{overrides.name('patch_size')}; the median image is {median_size}{hint}"
    elif all(p >= m for p, m in zip(patch, median, strict=True)):
        patch_reason = f"the median image, {median_size}, rounded up {up_to(overrides)}"
    else:
        largest = rounded_up(largest_patch(median, grid.spacing_mm), network.divisor())
        limit = "medconv plans"
        if prod(patch) < prod(largest):
            limit = "fits into memory" if size.memory_share == 1 else f"size {size.name} takes"
        patch_reason = f"the largest that {limit}; the median image is {median_size}{hint}"
    return [
        ("spacing", f"{size_text(grid.spacing_mm, 4)} mm", spacing_reason),
        ("patch", f"{size_text(patch, 4)} voxels", patch_reason),
    ]


def up_to(overrides: PlanOverrides) -> str:
    """What a patch is rounded up to, as the end of a sentence."""
    multiple = overrides.divisible_by
    return "to what the strides divide" if multiple == 1 else f"to multiples of {multiple}, for the network"


def _view_hint(grid: Grid, overrides: PlanOverrides) -> str:
    """What to do about a patch that sees little of the image."""
    share = f"; {percent(grid.view_share)} % of it"
    fewer = f"a smaller {overrides.name('batch_size')} or " if (overrides.batch_size or 1) > 1 else ""
    if grid.wider_spacing_mm is None:
        stages = [name for name in ("channels", "kernel_sizes") if getattr(overrides, name) is not None]
        lists = " and ".join(map(overrides.name, stages))
        return f"{share}; a coarser grid would have fewer stages than {lists}" if lists else share
    spacing = ",".join(f"{mm:g}" for mm in grid.wider_spacing_mm)
    coarser_grid = f"{overrides.name('spacing_mm')}=[{spacing}]"
    if grid.is_bounded:
        # while a patch saw very little, fewer were allowed
        limit = min(voxels_to_keep(grid.view_share), grid.voxels_kept or inf)
        return (
            f"{share}, but on a coarser grid the thinnest structure would have fewer than {limit:.2g} "
            f"voxels; if that is not needed, {coarser_grid} shows more"
        )
    return f"{share}: {fewer}{coarser_grid} would show more"


def dims_reason(fingerprint: Fingerprint, axis: int | None, overrides: PlanOverrides) -> str:
    if overrides.spatial_dims is not None:
        return overrides.dims_origin or overrides.name("spatial_dims")
    if axis is not None:
        why = "so few slices give a 3D kernel nothing to see"
        return f"slice by slice across the {_AXES[axis]} axis: {why}"
    if fingerprint.spatial_dims == 2:
        return "the images are pictures or single slices"
    if thick_axis(fingerprint) is None:
        return "the images are volumes"
    return "volumes of thick slices; the mean with a network of slices may be better: medconv ensemble --vary"


def coarser_reason(grid: Grid, use: str) -> str:
    """What a coarser grid is taken for, and what it costs."""
    reason = f"coarser than the images' {size_text(grid.native_spacing_mm, 4)}, so that {use}"
    if grid.voxels_kept is None:
        return reason
    return f"{reason}; along coarser axes the thinnest structure keeps {grid.voxels_kept:.2g} voxels"


def percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.2g}"


def network_rows(
    network: Network, patch: Sequence[int], spacing: Sequence[float], overrides: PlanOverrides
) -> list[ReportRow]:
    """Stages, strides, kernels and channels."""
    # stages: what sets their number or limits it, where something does
    lists = {name: getattr(overrides, name) for name in PER_STAGE}
    lengths = {name: len(value) for name, value in lists.items() if isinstance(value, (list, tuple))}
    limits = {"max_stages": overrides.max_stages, **lengths}
    reached = [overrides.name(name) for name, limit in limits.items() if limit == len(network.channels)]
    odd = "" if overrides.patch_size is None else "an odd number or "
    stages_reason = f"halved until {odd}fewer than {MIN_EDGE} voxels would remain"
    if overrides.strides is not None:
        stages_reason = overrides.name("strides")
    elif reached:
        stages_reason = f"{stages_reason}, up to {' and '.join(reached)}"
    # strides
    left = [edge // prod(step[axis] for step in network.strides) for axis, edge in enumerate(patch)]
    short = "short or odd" if overrides.patch_size is not None else "short"
    rests = f"an axis is not halved until the other axes' voxels are as long, or where it is {short}"
    even = "equal along all axes" if network.strides else "a single stage"
    late = any(1 in step for step in network.strides)
    if any(1 in kernel for kernel in network.kernel_sizes):
        axes = "axes with voxels at least twice as long as the finest"
        kernels_reason = f"1 along {axes}, until the spacing is even"
    elif max(spacing) < EVEN * min(spacing):
        kernels_reason = "voxels are near cubes" if len(spacing) == 3 else "voxels are near squares"
    else:
        kernels_reason = "3 along every axis in the last stage"
    reasons = {
        "stages": stages_reason,
        "strides": f"{rests if late else even}; the coarsest stage has {size_text(left, 4)} voxels",
        "kernel_sizes": kernels_reason,
        "channels": "twice as many in each stage, up to the size's limit",
    }
    reasons |= {name: overrides.name(name) for name in reasons if getattr(overrides, name, None) is not None}
    return [
        ("stages", str(len(network.channels)), reasons["stages"]),
        ("strides", _each(network.strides), reasons["strides"]),
        ("kernels", _each(network.kernel_sizes), reasons["kernel_sizes"]),
        ("channels", " ".join(map(str, network.channels)), reasons["channels"]),
    ]


def _each(rows: Sequence[Sequence[int]]) -> str:
    """Such as `1x2x2 (2), 2x2x2`: equal neighbours are counted."""
    texts = ["x".join(map(str, row)) for row in rows]
    counted = []
    for text, equal_neighbours in groupby(texts):
        count = len(list(equal_neighbours))
        counted.append(text if count == 1 else f"{text} ({count})")
    return ", ".join(counted) or "none"


def last_rows(
    normalisation: Sequence[str],
    modalities: Sequence[str],
    needed_gb: float,
    budget: Budget,
    overrides: PlanOverrides,
) -> list[ReportRow]:
    """Normalisation and memory."""
    modality = f"modality {', '.join(modalities)}"
    is_set = overrides.normalisation is not None
    mode = budget.activation_checkpointing
    checkpointing = "" if mode == "none" else f", activation_checkpointing={mode}"
    memory_reason = f"estimated for a step in {budget.precision}{checkpointing}; budget: {budget.origin}"
    return [
        ("normalisation", ", ".join(normalisation), overrides.name("normalisation") if is_set else modality),
        ("memory", f"{needed_gb:.2g} of {budget.memory_gb:g} GB", memory_reason),
    ]
