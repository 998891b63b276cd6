"""The checkpoint of a trained network, and variants of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny


def train(folder: Path) -> tuple[Path, Path]:
    """The images of a tiny dataset, and a checkpoint trained on them."""
    dataset = tiny.write_dataset(folder / "data")
    tiny.train(dataset, folder / "run", "augmentation.mirror_axes=[0,1]", "trainer.max_steps=8")
    return dataset / "imagesTr", folder / "run/checkpoints/best.ckpt"


def call(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, source: Path, *more: object) -> int:
    """The exit code of `medconv predict` with these arguments."""
    words = ["--checkpoint", checkpoint, "--input", source, "--device", "cpu", *more]
    return tiny.call(monkeypatch, "predict", *words)


def variant(
    source: Path, path: Path, edit: Callable[[dict[str, Any]], Any] | None = None, seed: int = 1
) -> Path:
    """A checkpoint with other weights, and with the edits of `edit` in its metadata."""
    content = torch.load(source, weights_only=True)
    generator = torch.Generator().manual_seed(seed)
    for name, value in content["state_dict"].items():
        if value.is_floating_point() and seed:
            content["state_dict"][name] = value + 0.1 * torch.randn(value.shape, generator=generator)
    if edit is not None:
        edit(content["medconv"])
    torch.save(content, path)
    return path


def regions(record: dict[str, Any]) -> None:
    """The three channels as regions that overlap."""
    record["targets"] = {
        "kind": "regions",
        "names": ["a", "b", "c"],
        "values": [[1, 2, 3], [2, 3], [3]],
        "order": [1, 2, 3],
        "ignore": None,
    }


def other_spacing(record: dict[str, Any]) -> None:
    record["preprocessing"]["spacing_mm"] = [1.4, 1.5, 2.0]


def refused(match: str) -> Any:
    return pytest.raises(ValueError, match=match)
