"""A trained network and its exported files, which several test files share."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import tiny
from torch import Tensor

from medconv.export import export
from medconv.export.formats import read_written
from medconv.inference.exported.metadata import as_loaded_model, digest, metadata_path
from medconv.inference.load import LoadedModel
from medconv.models.unet import UNet

FORMATS = ("torchscript", "onnx", "pt2")


class Exported(NamedTuple):
    """A folder of images, a checkpoint, and its files by format."""

    images: Path
    checkpoint: Path
    files: dict[str, Path]


class Branching(UNet):
    """Its code branches on the values of an image, so that it cannot be captured as one graph."""

    def forward(self, x: Tensor, stages: int = 0) -> Any:
        return super().forward(x if x.mean() > 0 else -x, stages)


def train(folder: Path, *more: str) -> tuple[Path, Path]:
    """The images of a tiny dataset, and a checkpoint trained on them, with conv=basis and instance norms."""
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


def shared(folder: Path) -> Exported:
    """The files in `folder`, made by the first process that calls this; others wait for it."""
    images, checkpoint = folder / "data/imagesTr", folder / "run/checkpoints/best.ckpt"
    files = {format: folder / f"model.{format}" for format in FORMATS}
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (done := folder / "done").exists():
            # enough steps for MONAI's label maps to agree with ours, and one validation
            slowly = ("optimizer.lr=0.005", "schedule.patch=whole")
            train(folder, "trainer.max_steps=150", "data.samples_per_epoch=300", *slowly)
            for format, path in files.items():
                export.export(checkpoint, path, export.ExportOptions(format, case=images / "case_1.nii.gz"))
            done.touch()
    return Exported(images, checkpoint, files)


def variant(source: Path, path: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """A checkpoint with an edited record."""
    content = torch.load(source, weights_only=True)
    edit(content["medconv"])
    torch.save(content, path)
    return path


def read_back(path: Path, format: str) -> LoadedModel:
    """An exported file of any format with its metadata, as export reads it back."""
    metadata = json.loads(metadata_path(path).read_text())
    return as_loaded_model(metadata, read_written(path, format), path, None)


def sealed(source: Path, path: Path, **changes: Any) -> Path:
    """Write the metadata of `source`, with changes, for the file `path`; returns `path`."""
    metadata = json.loads(metadata_path(source).read_text())
    metadata_path(path).write_text(json.dumps({**metadata, "sha256": digest(path), **changes}))
    return path


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that `medconv` with these arguments prints before it exits with an error."""
    capsys.readouterr()
    assert tiny.call(monkeypatch, *arguments) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.count("error:") == 1, error
    assert len(error.strip().splitlines()) == 1, error
    return error
