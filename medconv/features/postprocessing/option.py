"""The option `--postprocess` of `medconv predict`, and what it adds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from medconv.cli.parsers import Group

if TYPE_CHECKING:
    from medconv.features.postprocessing.extra import PostProcessing


def add_arguments(group: Group) -> None:
    group.add_argument(
        "--postprocess",
        type=Path,
        metavar="FILE",
        help="apply the post-processing in a file from medconv find-postprocessing",
    )


def extra(options: argparse.Namespace) -> PostProcessing | None:
    """Raises: ValueError: a file that holds no steps."""
    if options.postprocess is None:
        return None
    from medconv.features.postprocessing import steps
    from medconv.features.postprocessing.extra import PostProcessing

    return PostProcessing(steps.read(options.postprocess))
