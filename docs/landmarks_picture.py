"""Draws what a network learns of points, and where the point of a heatmap lies.

`python docs/landmarks_picture.py OUTPUT.png`: a generated image with two points; their heatmaps; their peaks.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy.ndimage import gaussian_filter

from medconv.features.landmarks.heatmaps import drawn, peaks

SHAPE = (48, 64)
POINTS = np.array([[30.4, 12.3], [17.7, 49.6]])
SIGMA = np.array([3.0, 3.0])
SHOWN = 6  # voxels around a peak


def main(output: Path) -> None:
    rng = np.random.default_rng(0)
    rows, columns = np.indices(SHAPE)
    middle = 24 + 7 * np.cos((columns - 12) / 37 * np.pi)
    between = (columns > POINTS[0, 1]) & (columns < POINTS[1, 1])
    organ = (np.abs(rows - middle) < 5 * np.sin((columns - 12.3) / 37.3 * np.pi).clip(0)) & between
    image = gaussian_filter(organ * 1.0, 1) + rng.normal(0, 0.08, SHAPE)
    heatmaps = drawn(POINTS, SIGMA, SHAPE).astype(np.float32)
    places, _ = peaks(heatmaps, SIGMA)
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 2.9), width_ratios=(4, 4, 3))
    axes[0].imshow(image, cmap="gray")
    axes[0].set_title("image and its points", fontsize=10)
    axes[1].imshow(heatmaps.max(0), cmap="inferno")
    axes[1].set_title("what the network learns", fontsize=10)
    axes[2].imshow(heatmaps[0], cmap="inferno")
    axes[2].set_title("a peak between voxels", fontsize=10)
    row, column = np.round(places[0])
    axes[2].set_xlim(column - SHOWN - 0.5, column + SHOWN + 0.5)
    axes[2].set_ylim(row + SHOWN + 0.5, row - SHOWN - 0.5)
    for panel, points in ((axes[0], POINTS), (axes[2], places[:1])):
        panel.plot(points[:, 1], points[:, 0], "+", color="#56b4e9", markersize=11, markeredgewidth=2)
    for panel in axes:
        panel.axis("off")
    figure.tight_layout()
    figure.savefig(output, dpi=100)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
