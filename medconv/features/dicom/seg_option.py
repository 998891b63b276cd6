"""The option `--dicom-seg` of `medconv predict`, and what it adds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from medconv.cli.parsers import Group

if TYPE_CHECKING:
    from medconv.features.dicom.seg_extra import DicomSeg


def add_arguments(group: Group) -> None:
    group.add_argument(
        "--dicom-seg",
        action="store_true",
        help="for DICOM input, also write OUTPUT/dicomseg/CASE.dcm, which refers to the slices",
    )


def extra(options: argparse.Namespace) -> DicomSeg | None:
    if not options.dicom_seg:
        return None
    from medconv.features.dicom.seg_extra import DicomSeg

    return DicomSeg()
