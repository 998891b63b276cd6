"""Streams of random numbers of training samples, each a function of (seed, stream, number).

Each purpose has a stream of its own, because one more draw in a stream changes all later numbers of it, and
with them every seeded run.
"""

from enum import IntEnum

import numpy as np


class RandomStream(IntEnum):
    """Purpose of the random numbers. A new purpose takes the next number; no number is used again."""

    PATCH_POSITION = 0
    CASE_ORDER = 1
    VALUES = 2  # of the augmentation: intensity, blur, noise
    PLACE = 3  # of the augmentation: rotation, scale, shift, mirroring
    ELASTIC = 4
    BALANCED_ORDER = 5  # order of the cases of each class; 6 was used by an earlier version
    MIXUP = 7
    TRANSFORMS = 8  # a user's own transforms, of MONAI or TorchIO
    PATCH_CLASS = 9  # class of a patch's central voxel, where classes are drawn before cases
    CHANNELS = 10  # which channels a sample lacks


def generator(seed: int, stream: RandomStream, *numbers: int) -> np.random.Generator:
    """The random generator of one sample or round.

    Args:
        seed: of the run.
        stream: purpose of the random numbers.
        numbers: of the sample, or of the round and the class.
    """
    return np.random.default_rng([seed, int(stream), *numbers])
