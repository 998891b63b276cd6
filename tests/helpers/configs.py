"""Values of a resolved config, for the tests of what reads them."""

from __future__ import annotations

from typing import Any

from medconv.config import Derived, compose


def derived(**values: Any) -> Derived:
    """Of 3D label maps, with these values."""
    filled: dict[str, Any] = {
        "targets": {"names": ["a", "b"]},
        "per_voxel": True,
        "class_counts": None,
        "num_channels": 1,
        "num_classes": 3,
        "num_train_cases": 5,
        "train_cases": "5 cases",
        "overlapping": False,
        "exclusive": True,
        "flip_label_pairs": None,
        "slice_axis": None,
        "class_names": ["background", "a", "b"],
        "memory_gb": 8.0,
        "size": "large",
        "normalisation": ["zscore"],
        "spatial_dims": 3,
        "spacing_mm": [1.0, 1.5, 2.0],
        "patch_size": [16, 16, 8],
        "channels": [4, 8],
        "kernel_sizes": [[3] * 3] * 2,
        "stem": {"kernel_size": 3},
        "strides": [[2, 2, 1]],
        "stage_strides": [[1] * 3, [2, 2, 1]],
        "monitor": "val/dice",
        "monitor_mode": "max",
        **values,
    }
    return Derived(**filled)


def composed(*arguments: str) -> Any:
    """The config that `medconv train` composes of these arguments."""
    return compose.compose(arguments)[0].values
