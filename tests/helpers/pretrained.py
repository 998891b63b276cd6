"""Small networks, files of weights and their comparison, for the tests of pretrained weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import derived
from monai.networks.nets.resnet import ResNet
from torch import nn

from medconv.config import Derived
from medconv.convs import basis, swap_convs
from medconv.features.pretrained.fit import Layers
from medconv.features.pretrained.load import load
from medconv.models.unet import UNet

DERIVED = derived(targets={"names": ["box", "hole"]})
UNET_LAYERS = Layers(image=frozenset({"encoder.0.0"}), head=frozenset({"head"}))


def unet(
    dims: int = 2, channels: int = 1, classes: int = 3, seed: int = 0, widths: tuple[int, ...] = (4, 8)
) -> UNet:
    """With running statistics as after a training."""
    torch.manual_seed(seed)
    network = UNet(dims, channels, classes, widths, strides=(2,) * (len(widths) - 1))
    for name, buffer in network.named_buffers():
        if "running" in name:
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return network.eval()


def unet_with_basis() -> nn.Module:
    network = unet()
    swap_convs(network, basis)
    return network


def resnet(dims: int = 2, channels: int = 3, classes: int = 10) -> ResNet:
    """MONAI's, with the names and sizes that torchvision's has."""
    settings = {"conv1_t_size": 7, "conv1_t_stride": 2, "bias_downsample": False}
    widths = [8, 16, 24, 32]
    return ResNet("basic", [1, 1, 1, 1], widths, dims, channels, num_classes=classes, **settings).eval()


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def our_checkpoint(network: nn.Module, saved: Derived) -> dict[str, Any]:
    """The part of a checkpoint of ours that loading reads."""
    return {
        "medconv": {"config": {"derived": asdict(saved)}},
        "state_dict": {f"network.{name}": value for name, value in network.state_dict().items()},
    }


def assert_same(network: nn.Module, source: nn.Module, different: tuple[str, ...] = ()) -> None:
    """All tensors are equal, but for those whose name begins with one of `different`: these all differ."""
    source_state = source.state_dict()
    for name, value in network.state_dict().items():
        assert torch.equal(value, source_state[name]) == (not name.startswith(different)), name


def assert_refused(network: nn.Module, path: Path, words: str) -> None:
    """Loading raises an error with these words and the path, and the network stays as it is."""
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(ValueError, match=words) as error:
        load(network, path, DERIVED)
    assert str(path) in str(error.value)
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in before.items())
