"""Draws a predicted label map beside its reference: three planes, outlines of both.

`python docs/result_picture.py IMAGE REFERENCE PREDICTION OUTPUT.png NAME NAME ...`; the names of the classes
1, 2, ... are the legend.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from medconv.data.io.images import read_image, read_label
from medconv.data.io.raster import colour
from medconv.data.preprocessing.preprocess import to_canonical

WORDS = ("from the side", "from the front", "from above")


def main(image: Path, reference: Path, prediction: Path, output: Path, *names: str) -> None:
    voxels, grid = read_image([image])
    labels = [read_label(path)[0][None] for path in (reference, prediction)]
    (shown, spacing), *rest = (to_canonical(array, grid) for array in (voxels, *labels))
    truth, predicted = (array[0] for array, _ in rest)
    low, high = np.percentile(shown, (1, 99.5))
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.8), facecolor="black")
    for axis, panel, word in zip((0, 1, 2), axes, WORDS, strict=True):
        at = int((truth > 0).sum(tuple(a for a in range(3) if a != axis)).argmax())
        plane, *maps = (array.take(at, axis).T for array in (shown[0], truth, predicted))
        height, width = (spacing[a] for a in range(2, -1, -1) if a != axis)
        panel.imshow(
            plane, "gray", vmin=low, vmax=high, origin="lower", interpolation="bicubic", aspect=height / width
        )
        for value in range(1, truth.max() + 1):
            if (maps[1] == value).any():
                panel.contourf(maps[1] == value, [0.5, 1.5], colors=[colour(value)], alpha=0.5)
            if (maps[0] == value).any():
                panel.contour(maps[0] == value, [0.5], colors="white", linewidths=1.2)
        panel.set_title(word, color="white", fontsize=10)
        panel.axis("off")
    legend = [Patch(color=colour(value), label=name) for value, name in enumerate(names, 1)]
    legend.append(Line2D([], [], color="white", label="reference"))
    figure.legend(handles=legend, loc="lower center", ncols=len(legend), frameon=False, labelcolor="white")
    figure.tight_layout(pad=0.4, rect=(0, 0.09, 1, 0.93))
    figure.savefig(output, dpi=110, facecolor="black")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]), *sys.argv[5:])
