"""Draws what a plan decides: the patch in the image, the stages of the network, patches that grow in the run.

`python docs/plan_picture.py RUN OUTPUT.svg`; the data of the run must still be where they were.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle
from omegaconf import OmegaConf

from medconv.data.preprocessing.dataset_cache import cached_fingerprint, dataset_folder
from medconv.planning.spacing import median_shape, target_spacing
from medconv.training.data_setup import find_data

TEAL = "#009688"
GREY = "0.6"


def main(run: Path, output: Path) -> None:
    config: Any = OmegaConf.load(run / "config.yaml")
    derived = config.derived
    plt.rcParams |= {"svg.hashsalt": "plan", "svg.fonttype": "none", "font.size": 9}
    figure, (field, stages, growth) = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    image, native_spacing = median_image(config)
    sizes = {
        "median image": image * native_spacing,
        "patch": np.multiply(derived.patch_size, derived.spacing_mm),
        "as many voxels of the images' grid": np.multiply(derived.patch_size, native_spacing),
    }
    draw_field(field, sizes)
    draw_stages(stages, derived)
    draw_growth(growth, run / "metrics.csv", int(np.prod(derived.patch_size)))
    spacing = " x ".join(f"{mm:.3g}" for mm in derived.spacing_mm)
    figure.suptitle(f"{config.data.root.rsplit('/')[-1]}: voxels of {spacing} mm, size {derived.size}")
    figure.savefig(output, metadata={"Date": None})


def median_image(config: Any) -> tuple[np.ndarray, np.ndarray]:
    """Its voxels along each axis, and their edges in mm."""
    dataset = find_data(config.data)
    measured, _ = cached_fingerprint(dataset, dataset_folder(Path(config.data.cache_dir), dataset))
    spacing = target_spacing(measured)
    return np.array(median_shape(measured, spacing)), np.array(spacing)


def draw_field(axes: Any, sizes: dict[str, np.ndarray]) -> None:
    """Rectangles of the first two axes, in mm, around one centre."""
    styles = ((GREY, "-"), (TEAL, "-"), (TEAL, ":"))
    for (label, size), (colour, line) in zip(sizes.items(), styles, strict=True):
        rectangle = Rectangle(
            -size[:2] / 2,
            *size[:2],
            edgecolor=colour,
            linestyle=line,
            facecolor="none",
            linewidth=2,
            label=label,
        )
        axes.add_patch(rectangle)
    reach = 0.55 * max(size[:2].max() for size in sizes.values())
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", title="what a patch sees, mm")
    axes.legend(loc="upper center", frameon=False, bbox_to_anchor=(0.5, -0.12))


def draw_stages(axes: Any, derived: Any) -> None:
    """A box per stage of the encoder: as wide as its longest axis has voxels, as high as its channels."""
    voxels = np.array(derived.patch_size)
    left = 0.0
    for channels, stride in zip(derived.channels, [[1] * len(voxels), *derived.strides], strict=True):
        voxels = voxels // np.array(stride)
        axes.add_patch(Rectangle((left, 0), voxels.max(), channels, facecolor=TEAL, alpha=0.6, edgecolor="w"))
        axes.text(left + voxels.max() / 2, channels, f"{channels}\n", ha="center", va="center")
        axes.text(
            left + voxels.max() / 2,
            -0.03,
            "\n".join(map(str, voxels)),
            ha="center",
            va="top",
            transform=axes.get_xaxis_transform(),
        )
        left += voxels.max() + 4
    axes.set(xlim=(0, left), ylim=(0, 1.15 * max(derived.channels)), ylabel="channels", xticks=[])
    axes.set_title("stages of the network; voxels below")
    axes.spines[["top", "right"]].set_visible(False)


def draw_growth(axes: Any, metrics: Path, patch_voxels: int) -> None:
    """Voxels of the training patch, and the validation Dice, over the steps."""
    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    patch = [
        (int(row["step"]), float(row["train/patch_voxels"])) for row in rows if row["train/patch_voxels"]
    ]
    dice = [(int(row["step"]), float(row["val/dice"])) for row in rows if row["val/dice"]]
    steps, voxels = np.array(patch).T
    axes.plot(steps, 100 * voxels / patch_voxels, color=GREY, label="patch, % of the whole one")
    axes.set(xlabel="step", ylim=(0, 110), title="patches grow")
    twin = axes.twinx()
    twin.plot(*np.array(dice).T, color=TEAL, marker="o", markersize=3, label="Dice on whole images")
    twin.set(ylim=(0, 1.1))
    lines = [*axes.get_lines(), *twin.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="lower right", frameon=False)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
