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

from medconv import config
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.features.export import export
from medconv.features.export.formats import read_written
from medconv.features.export.job import ExportOptions
from medconv.features.export.metadata import metadata_path
from medconv.inference.load import LoadedModel
from medconv.inference.sliding_window import EVEN_DISTANCE, FIXED_DISTANCE, SlidingWindow
from medconv.models.unet import UNet
from medconv.targets import Targets

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
                export.export(checkpoint, path, ExportOptions(format, case=images / "case_1.nii.gz"))
            done.touch()
    return Exported(images, checkpoint, files)


def variant(source: Path, path: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """A checkpoint with an edited record."""
    content = torch.load(source, weights_only=True)
    edit(content["medconv"])
    torch.save(content, path)
    return path


def read_back(path: Path, format: str) -> LoadedModel:
    """An exported file of any format, as a program would predict with it that has only the file and its metadata."""
    metadata = json.loads(metadata_path(path).read_text())
    inputs, windows, outputs = metadata["inputs"], metadata["windows"], metadata["outputs"]
    names = ("spatial_dims", "spacing_mm", "normalisation", "slice_axis", "frame", "resize", "convention")
    values = {name: config.lists_to_tuples(inputs[name]) for name in names}
    preprocessing = PreprocessingConfig(intensities=tuple(inputs["intensities"]), **values)
    window = SlidingWindow(
        patch_size=tuple(windows["patch_size"]),
        overlap=windows["overlap"],
        batch_size=windows["batch_size"],
        mirror_axes=tuple(windows["mirror_axes"]),
        slice_axis=preprocessing.slice_axis,
        flip_label_pairs=config.lists_to_tuples(windows["flip_label_pairs"]),
        placement=FIXED_DISTANCE if preprocessing.convention is None else EVEN_DISTANCE,
    )
    return LoadedModel(
        network=read_written(path, format),
        preprocessing=preprocessing,
        window=window,
        class_names=tuple(outputs["class_names"]),
        targets=Targets.from_plain(outputs["targets"]),
        modalities=tuple(inputs["channels"]),
        precision="32-true",
        memory_format=torch.contiguous_format,
        spacing_range_mm=config.lists_to_tuples(inputs["spacing_range_mm"]),
        path=path,
        seen_axes=tuple(windows["seen_axes"]),
        equivariant_axes=tuple(windows["equivariant_axes"]),
        rounding=tuple(inputs["rounding"]),
        source_spacing_mm=inputs.get("source_spacing_mm"),
    )


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that `medconv` with these arguments prints before it exits with an error."""
    capsys.readouterr()
    assert tiny.call(monkeypatch, *arguments) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.count("error:") == 1, error
    assert len(error.strip().splitlines()) == 1, error
    return error
