"""medconv/features/pretrained/read.py: formats of files, and files that are refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pretrained import DERIVED, assert_refused, assert_same, resnet, save, unet
from monai.networks.nets import DynUNet

from medconv.features.pretrained.load import load
from medconv.features.pretrained.read import planned_as


@pytest.mark.parametrize("file", ["file.safetensors", "file.pth"])
@pytest.mark.parametrize("build", [resnet, lambda: DynUNet(2, 3, 2, [3] * 3, [1, 2, 2], [2, 2], [4, 8, 8])])
def test_pth_and_safetensors_files_give_all_tensors(build, file, tmp_path):
    torch.manual_seed(1)
    source, network = build(), build()
    state = {name: value.clone() for name, value in source.state_dict().items()}
    if file.endswith("safetensors"):
        pytest.importorskip("safetensors.torch").save_file(state, tmp_path / file)
    else:
        torch.save(state, tmp_path / file)
    report = load(network, tmp_path / file, replace(DERIVED, num_channels=3))
    assert_same(network, source)
    assert not report.random and not report.unused


def test_only_checkpoints_of_ours_tell_the_size_and_the_slices_of_a_plan(tmp_path):
    state = unet().state_dict()
    assert planned_as(save(tmp_path / "others.pth", state)) == {}
    for derived, size, axis in (({"size": "tiny", "slice_axis": 2}, "tiny", 2), ({}, "full", None)):
        content = {"state_dict": state, "medconv": {"config": {"derived": derived}}}
        assert planned_as(save(tmp_path / "ours.ckpt", content)) == {"size": size, "slice_axis": axis}


def test_a_half_precision_file_of_an_older_torch_is_read(tmp_path):
    """Not a zip archive, and without `num_batches_tracked`."""
    source, network = unet(seed=1), unet(seed=2)
    state = {k: v.half() for k, v in source.state_dict().items() if "num_batches" not in k}
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    report = load(network, tmp_path / "old.pth", DERIVED)
    assert not report.random and network.head.weight.dtype == torch.float32
    torch.testing.assert_close(network.head.weight, source.head.weight, rtol=1e-3, atol=1e-3)


def test_a_missing_or_damaged_file_is_refused(tmp_path):
    content = save(tmp_path / "complete.pth", unet().state_dict()).read_bytes()
    (tmp_path / "half.pth").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.pth").write_text("no weights")
    (tmp_path / "text.safetensors").write_text("no weights, either, in this file")
    for name, words in {
        "half.pth": "damaged or not a checkpoint",
        "text.pth": "refused, it holds more than tensors and plain values, or is no checkpoint",
        "none.pth": "no such checkpoint",
        "text.safetensors": "damaged or not a safetensors file|needs the package safetensors: pip install",
        "none.safetensors": "no such checkpoint|needs the package safetensors: pip install",
    }.items():
        with pytest.raises(ValueError, match=rf"{name}: ({words})"):
            load(unet(), tmp_path / name, DERIVED)


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def self_containing():
    content = {"epoch": 1}
    content["again"] = content
    return content


REFUSED = {
    "payload": (
        lambda path: {**unet().state_dict(), "more": Payload(path / "hit")},
        "refused, it holds more than tensors",
    ),
    "a whole module": (lambda path: unet(), "refused, it holds more than tensors"),
    "a list": (lambda path: [torch.zeros(2)], "holds a list, expected tensors by name"),
    "no tensors": (lambda path: self_containing(), "holds no tensors by name"),
}


@pytest.mark.parametrize("content", REFUSED)
def test_a_file_with_more_or_less_than_tensors_is_refused_and_runs_no_code(content, tmp_path):
    make, words = REFUSED[content]
    assert_refused(unet(), save(tmp_path / "file.pth", make(tmp_path)), words)
    assert not (tmp_path / "hit").exists()
