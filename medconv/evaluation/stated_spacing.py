"""The voxel spacing that `data.source_spacing_mm` stated of predicted images, from their manifest."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from medconv.data.case import Grid
from medconv.data.per_case import check_source_spacing, source_spacing
from medconv.inference import output
from medconv.inference.output import MANIFEST
from medconv.utils.errors import explained


def stated_spacing(predictions: Path) -> Any:
    """The value of `data.source_spacing_mm` for the images of these predictions; None: not set.

    Raises:
        ValueError: the manifest's value is not a spacing.
    """
    stated = output.read_manifest(predictions).get("settings", {}).get("source_spacing_mm")
    if stated is not None:
        with explained(f"{predictions / MANIFEST}"):
            check_source_spacing(stated)
    return stated


def agreed_spacing(predictions: Sequence[Path], cases: Collection[str]) -> list[Any]:
    """`stated_spacing` of folders of predictions of the same cases; a folder that states nothing takes that
    of another.

    Raises:
        ValueError: two differ for a case.
    """
    stated = [stated_spacing(folder) for folder in predictions]
    first_stated = next((spacing for spacing in stated if spacing is not None), None)
    if first_stated is None:
        return stated
    agreed = [first_stated if spacing is None else spacing for spacing in stated]
    for case in sorted(cases):
        spacings = [source_spacing(spacing, case) for spacing in agreed]
        # the same spacing may be written in several ways
        if any(spacing != spacings[0] for spacing in spacings):
            raise ValueError(
                f"case {case}: by data.source_spacing_mm in {MANIFEST} its spacing is {spacings[0]} mm in "
                f"{predictions[0]}, {spacings[-1]} in {predictions[-1]}; the same reference cannot have both"
            )
    return agreed


def stated_grid(grid: Grid, stated: Any, case: str) -> Grid:
    """The grid with the stated spacing.

    Args:
        grid: of the file.
        stated: from `stated_spacing`.
        case: its id.
    """
    if stated is None:
        return grid
    spacing_mm = source_spacing(stated, case)
    return grid if spacing_mm is None else grid.with_spacing_mm(spacing_mm)
