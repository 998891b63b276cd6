"""Fingerprints of datasets whose plan is known, for the tests of planning."""

from __future__ import annotations

from typing import Any

from medconv.data.preprocessing.fingerprint import Fingerprint
from medconv.planning.planner import Plan
from medconv.planning.topology import Budget

# GB in which our U-Net takes what nnU-Net 2.8.1 plans for 8: its number stands for half precision with a norm
# that keeps more, ours is a count of fp32's bytes. 9.7 to 10.3 give all four of its patches.
NNUNET = Budget(10)
# nnU-Net's own planner on the published fingerprints (median shape and spacing, cases, channels, classes),
# turned to our axes: patch, batch, strides.
HALVED, PLANE = (2, 2, 2), (2, 2, 1)
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "hippocampus": ((35, 50, 36), (1.0, 1.0, 1.0), 260, 1, 3, (40, 56, 40), 9, (HALVED,) * 3),
    "heart": ((232, 320, 115), (1.25, 1.25, 1.37), 20, 1, 2, (160, 192, 80), 2, (*(HALVED,) * 4, PLANE)),
    "liver": ((512, 512, 432), (0.7676, 0.7676, 1.0), 131, 1, 3, (128, 128, 128), 2, (HALVED,) * 5),
    "prostate": (
        *((320, 320, 20), (0.625, 0.625, 3.6), 32, 2, 3, (256, 320, 20), 2),
        (PLANE, PLANE, HALVED, PLANE, PLANE, PLANE),  # nnU-Net halves 20 slices twice
    ),
}


def fingerprint(shapes: Any, spacings_mm: Any, channels: int = 1, classes: int = 2) -> Fingerprint:
    dims = len(shapes[0])
    return Fingerprint(
        dims, tuple(shapes), tuple(spacings_mm), ({},) * channels, ((1,) * classes,) * len(shapes)
    )


def single_case(shape: tuple[int, ...], spacing_mm: tuple[float, ...]) -> Fingerprint:
    return fingerprint([shape], [spacing_mm])


def published(name: str) -> Fingerprint:
    shape, spacing, cases, channels, classes = PUBLISHED[name][:5]
    return fingerprint([shape] * cases, [spacing] * cases, channels, classes)


def reason(plan: Plan, row: str) -> str:
    """The reason in a row of the plan's table."""
    return next(why for name, _, why in plan.rows if name == row)
