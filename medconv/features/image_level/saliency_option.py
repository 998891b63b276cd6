"""The option `--saliency` of `medconv predict`, and what it adds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from medconv.cli.parsers import Group

if TYPE_CHECKING:
    from medconv.features.image_level.saliency_extra import Saliency


def add_arguments(group: Group) -> None:
    group.add_argument(
        "--saliency",
        action="store_true",
        help="for classification, also write Grad-CAM pictures, OUTPUT/saliency/CASE.png",
    )


def extra(options: argparse.Namespace) -> Saliency | None:
    if not options.saliency:
        return None
    from medconv.features.image_level.saliency_extra import Saliency

    return Saliency()
