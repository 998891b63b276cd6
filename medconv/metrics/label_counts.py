"""How often each value occurs in a label map."""

import numpy as np

from medconv.metrics.dice import pieces


def value_counts(label: np.ndarray) -> np.ndarray:
    """Voxels of each value from 0 to the highest; sorting those of a CT, as `unique` does, takes long.

    Shape: any, integers from 0 on -> (values,) int64.
    """
    counts = np.zeros(1 + int(label.max(initial=0)), np.int64)
    for voxels in pieces(label, order="K"):
        counts += np.bincount(voxels, minlength=len(counts))
    return counts
