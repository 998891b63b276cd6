"""Draws what a network of a label map and a value gives: both, and what each pixel adds to the value.

`python docs/joint_picture.py OUTPUT.png`: a small network is trained on generated discs, of which the large
ones are of one class.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor

from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.joint.losses import JointLoss
from medconv.features.joint.targets import JointTargets
from medconv.models.unet import UNet
from medconv.training.losses.segmentation import DiceCrossEntropy

EDGE = 64
TARGETS = JointTargets(("disc",), ((1,),), of_image=MulticlassTargets(("small", "large")))
STEPS = 150


def sample(number: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Image, label map and class."""
    rng = np.random.default_rng(number)
    is_large = number % 2
    radius = rng.uniform(13, 17) if is_large else rng.uniform(6, 10)
    row, column = rng.uniform(22, 42, 2)
    rows, columns = np.indices((EDGE, EDGE))
    label = (rows - row) ** 2 + (columns - column) ** 2 < radius**2
    image = gaussian_filter(label * 1.0, 1) + rng.normal(0, 0.25, (EDGE, EDGE))
    return image.astype(np.float32), label.astype(np.int64), float(is_large)


def batch(first: int, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    images, labels, classes = zip(*(sample(first + number) for number in range(size)), strict=True)
    values = torch.tensor(classes)[:, None]
    return torch.tensor(np.stack(images))[:, None], torch.tensor(np.stack(labels))[:, None], values


def main(output: Path) -> None:
    torch.manual_seed(0)
    network = UNet(2, 1, TARGETS.num_outputs, [8, 16, 32], [2, 2])
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    loss = JointLoss(DiceCrossEntropy())
    for step in range(STEPS):
        image, label, values = batch(100 + 8 * step)
        optimizer.zero_grad()
        TARGETS.compare(loss, network(image), label, values=values).backward()
        optimizer.step()
    network.eval()
    image, _, _ = batch(0, 2)
    with torch.no_grad():
        outputs = network(image)
    maps, pooled = TARGETS.split(outputs)
    probabilities = TARGETS.answer_of_image(pooled).numpy()
    evidence = (outputs[:, 3] - outputs[:, 2]).numpy()  # for `large` against `small`
    limit = np.abs(evidence).max()
    figure, axes = plt.subplots(2, 3, figsize=(7.2, 5.0))
    for row, panels in enumerate(axes):
        panels[0].imshow(image[row, 0], cmap="gray")
        panels[1].imshow(maps[row].argmax(0), cmap="gray")
        panels[2].imshow(evidence[row], cmap="coolwarm", vmin=-limit, vmax=limit)
        best = int(probabilities[row].argmax())
        titles = (
            "image",
            f"label map, {TARGETS.of_image.names[best]} {probabilities[row, best]:.2f}",
            f"for `large`, mean {evidence[row].mean():+.1f}",
        )
        for panel, title in zip(panels, titles, strict=True):
            panel.set_title(title, fontsize=10)
            panel.axis("off")
    figure.tight_layout()
    figure.savefig(output, dpi=90)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
