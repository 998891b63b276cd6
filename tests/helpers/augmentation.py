"""Settings and sizes of the augmentation tests."""

from typing import Any

from medconv.data.augmentation.parameters import INTENSITY, SPATIAL

ALL: dict[str, Any] = {
    "p": dict.fromkeys((*SPATIAL, *INTENSITY), 1.0),
    "rotation_deg": 20,
    "scale": (0.8, 1.25),
    "shift": 0.1,
}

SHAPES = {2: (20, 17), 3: (14, 12, 10)}

SPACING = (1, 1.5, 2)
