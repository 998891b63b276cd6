"""Draws what a network learns of touching objects, and how they are told apart again.

`python docs/instances_picture.py OUTPUT.png`: generated discs; their interior and border; their objects, from
the classes alone.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from scipy.ndimage import gaussian_filter

from medconv.features.instances.objects import classes_of, objects_of

SIZE = 96
COUNT = 26


def main(output: Path) -> None:
    rng = np.random.default_rng(3)
    rows, columns = np.indices((SIZE, SIZE))
    objects = np.zeros((SIZE, SIZE), np.int16)
    for value in range(1, COUNT + 1):
        row, column = rng.uniform(6, SIZE - 6, 2)
        long, short = rng.uniform(7, 11), rng.uniform(6, 8)
        disc = ((rows - row) / long) ** 2 + ((columns - column) / short) ** 2 < 1
        # nuclei touch, but seldom lie on one another
        if (disc & (objects > 0)).sum() < 0.2 * disc.sum():
            objects[disc & (objects == 0)] = value
    image = gaussian_filter((objects > 0) * 1.0, 1.5) + rng.normal(0, 0.06, objects.shape)
    classes = classes_of(objects)
    numbers = objects_of(classes)
    colours = ListedColormap(["black", *plt.get_cmap("tab20").colors])
    panels = {
        "image": (image, "gray"),
        "what the network learns": (classes, ListedColormap(["black", "#56b4e9", "#e69f00"])),
        "one value for each object": (np.where(numbers > 0, 1 + numbers % 20, 0), colours),
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(8.4, 3.0))
    for panel, (title, (values, colour)) in zip(axes, panels.items(), strict=True):
        panel.imshow(values, cmap=colour, interpolation="nearest")
        panel.set_title(title, fontsize=10)
        panel.axis("off")
    figure.tight_layout()
    figure.savefig(output, dpi=100)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
