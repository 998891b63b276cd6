"""Oracles of the convolutions: plain loops in float64, any number of axes."""

from collections.abc import Sequence
from itertools import product
from math import exp, sqrt

import numpy as np

_PAD = {"zeros": "constant", "circular": "wrap", "reflect": "reflect", "replicate": "edge"}


def convolve(
    image: np.ndarray,
    weight: np.ndarray,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    padding_mode: str = "zeros",
    groups: int = 1,
) -> np.ndarray:
    """(batch, in, *spatial) and (out, in / groups, *kernel) -> (batch, out, *spatial'), without a bias."""
    padded = np.pad(image, [(0, 0), (0, 0), *((p, p) for p in padding)], mode=_PAD[padding_mode])
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    size = [(n - r) // s + 1 for n, r, s in zip(padded.shape[2:], reach, stride, strict=True)]
    result = np.zeros((len(image), len(weight), *size))
    for b, o, *position in product(range(len(image)), range(len(weight)), *map(range, size)):
        total, first = 0.0, o // (len(weight) // groups) * weight.shape[1]
        for tap in product(*map(range, weight.shape[2:])):
            voxel = tuple(p * s + t * d for p, s, t, d in zip(position, stride, tap, dilation, strict=True))
            for i in range(weight.shape[1]):
                total += weight[(o, i, *tap)] * padded[(b, first + i, *voxel)]
        result[(b, o, *position)] = total
    return result


def mix_channels(image: np.ndarray, transform: np.ndarray) -> np.ndarray:
    """The 1x1 convolution T x: (batch, in, *spatial) and (transform, in) -> (batch, transform, *spatial)."""
    result = np.zeros((len(image), len(transform), *image.shape[2:]))
    for b, t, i in product(range(len(image)), range(len(transform)), range(image.shape[1])):
        result[b, t] += transform[t, i] * image[b, i]
    return result


def dense_bank(blocks: np.ndarray, kernel_size: Sequence[int], groups: int) -> np.ndarray:
    """Blocks (out, width of a block, taps) -> the whole bank (out, transform, *kernel), with zeros between
    the blocks.
    """
    out, width, _ = blocks.shape
    bank = np.zeros((out, groups * width, *kernel_size))
    for o, t in product(range(out), range(width)):
        bank[o, o // (out // groups) * width + t] = blocks[o, t].reshape(kernel_size)
    return bank


def nearest_transform(weight: np.ndarray, bank: np.ndarray) -> np.ndarray:
    """The T of least |S T - W|^2: weight (out, in, *kernel), bank (out, transform, *kernel) -> (transform,
    in).
    """
    out, transform_channels = bank.shape[:2]
    system = np.stack([bank[:, t].ravel() for t in range(transform_channels)], axis=1)
    kernels = np.stack([weight[:, i].reshape(out, -1).ravel() for i in range(weight.shape[1])], axis=1)
    return np.linalg.lstsq(system, kernels, rcond=None)[0]


def fold(transform: np.ndarray, bank: np.ndarray) -> np.ndarray:
    """W[o, i, k] = sum over t of S[o, t, k] T[t, i]."""
    weight = np.zeros((len(bank), transform.shape[1], *bank.shape[2:]))
    for o, i, t in product(range(len(bank)), range(transform.shape[1]), range(len(transform))):
        weight[o, i] += bank[o, t] * transform[t, i]
    return weight


def jet(kernel_size: Sequence[int], spacing: Sequence[float], sigma: float) -> list[np.ndarray]:
    """Gaussian, first and second derivatives at every voxel's place in mm, each of unit norm."""
    wide = [axis for axis, k in enumerate(kernel_size) if k > 1]
    pairs = [(a, b) for a in wide for b in wide if a <= b]
    filters = [np.zeros(kernel_size) for _ in range(1 + len(wide) + len(pairs))]
    for tap in product(*map(range, kernel_size)):
        x = [(t - k // 2) * s for t, k, s in zip(tap, kernel_size, spacing, strict=True)]
        gaussian = exp(-sum(v * v for v in x) / (2 * sigma**2))
        values = [gaussian, *(-x[a] / sigma**2 * gaussian for a in wide)]
        values += [(x[a] * x[b] / sigma**4 - (a == b) / sigma**2) * gaussian for a, b in pairs]
        for array, value in zip(filters, values, strict=True):
            array[tap] = value
    for array in filters[1 + len(wide) :]:
        array -= array.mean()
    return [array / sqrt((array**2).sum()) for array in filters]
