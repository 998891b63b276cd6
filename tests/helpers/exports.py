"""A trained network and its exported files, for the tests in this folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers import tiny
from torch import Tensor

from medconv.export.formats import read_written
from medconv.inference.exported.metadata import as_loaded_model, digest, metadata_path
from medconv.inference.load import LoadedModel
from medconv.models.unet import UNet

FORMATS = ("torchscript", "onnx", "pt2")


class Branching(UNet):
    """Its Python looks at the values of an image, so that it is no one graph."""

    def forward(self, x: Tensor, stages: int = 0) -> Any:
        return super().forward(x if x.mean() > 0 else -x, stages)


def train(folder: Path, *more: str) -> tuple[Path, Path]:
    """The images of a tiny dataset, and a checkpoint trained on them, with priors and our own norms."""
    dataset = tiny.write_dataset(folder / "data")
    settings = (
        "conv=basis",
        "model.norm=instance",
        "augmentation.mirror_axes=[0,1]",
        "trainer.max_steps=4",
        *more,
    )
    tiny.train(dataset, folder / "run", *settings)
    return dataset / "imagesTr", folder / "run/checkpoints/best.ckpt"


def variant(source: Path, path: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """A checkpoint with something else in its record."""
    content = torch.load(source, weights_only=True)
    edit(content["medconv"])
    torch.save(content, path)
    return path


def read_back(path: Path, format: str) -> LoadedModel:
    """An exported file of any format with its metadata, as export itself reads what it has written."""
    metadata = json.loads(metadata_path(path).read_text())
    return as_loaded_model(metadata, read_written(path, format), path, None)


def sealed(source: Path, path: Path, **changes: Any) -> Path:
    """A metadata for `path`, which is that of `source` otherwise."""
    metadata = json.loads(metadata_path(source).read_text())
    metadata_path(path).write_text(json.dumps({**metadata, "sha256": digest(path), **changes}))
    return path
