"""The options `--quality` and `--calibration` of `medconv predict`, and what they add."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from medconv.cli.parsers import Group

if TYPE_CHECKING:
    from medconv.features.quality.extra import Quality


def add_arguments(group: Group) -> None:
    group.add_argument(
        "--quality",
        action="store_true",
        help="also write OUTPUT/quality/CASE.json, an estimate of Dice, and OUTPUT/uncertainty/CASE.nii.gz",
    )
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="with --quality: metrics.json of medconv evaluate, to also write the expected Dice",
    )


def extra(options: argparse.Namespace) -> Quality | None:
    """Raises: ValueError: a calibration of nothing."""
    if options.calibration and not options.quality:
        raise ValueError("--calibration turns what --quality measures into Dice: add --quality")
    if not options.quality:
        return None
    from medconv.features.quality.extra import Quality

    return Quality(options.calibration)
