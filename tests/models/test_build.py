"""medconv/models/build.py: `model`, its `conv` and pretrained weights in one order, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.configs import derived
from monai.utils import optional_import
from torch.nn.utils.parametrize import is_parametrized

from medconv import config as configs
from medconv.config import ConfigError
from medconv.convs import SwapReport
from medconv.convs.parametrization import Foldable
from medconv.models import UNet, build
from medconv.models.build import PLAIN_CONV, build_network, check_conv

NETWORK = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": [4, 8], "strides": [2]}
CONV = {"_target_": "medconv.convs.basis", "_partial_": True, "where": "encoder"}
LABEL_MAPS = derived(spatial_dims=2, num_classes=2, patch_size=[8, 8])


def model(target="medconv.models.UNet"):
    return {"_target_": target, **NETWORK}


@pytest.mark.parametrize("init_from_weights", [True, False])
def test_pretrained_weights_are_loaded_before_the_swap_only_if_conv_projects_them(init_from_weights):
    swapped_when_loading = []
    network = build_network(
        model(),
        {**CONV, "init_from_weights": init_from_weights},
        LABEL_MAPS,
        load=lambda network: swapped_when_loading.append(is_parametrized(network.encoder[0][0])),
    )
    assert swapped_when_loading == [not init_from_weights]
    assert isinstance(network, UNet) and network.training
    assert is_parametrized(network.encoder[1][0]) and not is_parametrized(network.decoder[0][0])


@pytest.mark.parametrize(
    ("conv", "changed", "message"),
    [
        (
            CONV,
            {"patch_size": [7, 8]},
            r"^model cannot take data\.patch_size=\[7, 8\]: the spatial size must be divisible",
        ),
        (CONV, {"num_classes": 3}, r"logits of shape \(1, 3, 8, 8\) .* returns \(1, 2, 8, 8\); model=custom"),
        (CONV, {"per_voxel": False}, r"logits of shape \(1, 2\) .*; model=resnet, densenet"),
        ({**CONV, "where": "stem"}, {}, r"^conv: .* not matched by 'stem'"),
        ({**CONV, "share": 2.0}, {}, r"^conv: share must be a number, more than 0 and at most 1, got 2.0"),
    ],
    ids=["patch size", "classes", "segmentation network for image labels", "no layer to swap", "share"],
)
def test_a_network_that_does_not_fit_the_task_is_refused(conv, changed, message):
    with pytest.raises(ConfigError, match=message):
        build_network(model(), conv, replace(LABEL_MAPS, **changed))


def test_a_network_that_needs_another_package_names_it(monkeypatch):
    """Of MONAI's own kind: what is missing is raised once it is used."""
    absent, found = optional_import("no_such_package", name="rearrange")
    assert not found
    monkeypatch.setattr("monai.networks.nets.swin_unetr.rearrange", absent)
    sizes = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "feature_size": 12}
    target = "monai.networks.nets.SwinUNETR"
    with pytest.raises(
        ConfigError, match=rf"^model: {target} needs the package no_such_package: pip install no_such_pa"
    ):
        build_network({"_target_": target, **sizes}, PLAIN_CONV, replace(LABEL_MAPS, patch_size=[64, 64]))


@pytest.mark.parametrize("weights_follow", [False, True])
def test_the_report_is_logged_by_whatever_function_builds(caplog, weights_follow):
    with caplog.at_level(logging.INFO, "medconv.models.build"):
        build_network(model(), CONV, LABEL_MAPS, partial(configs.build), weights_follow=weights_follow)
    assert ("4 convolutions swapped" in caplog.text) != weights_follow


@pytest.mark.parametrize("share", [None, 1.0, 0.5])
def test_weights_are_not_drawn_where_those_of_a_checkpoint_follow(share, monkeypatch):
    """With a share of the outputs, layers are split, and not only drawn."""
    swapped = []
    monkeypatch.setattr(build, "swap_convs", lambda *_, **__: swapped.append("all") or SwapReport(["all"]))
    conv = {"_target_": "medconv.convs.smooth", "_partial_": True, "share": share}
    build_network(model(), conv, LABEL_MAPS, weights_follow=True)
    assert bool(swapped) == (share == 0.5)


def test_a_patch_that_another_network_cannot_take_is_refused_with_what_helps():
    segresnet = {"_target_": "monai.networks.nets.SegResNet", "spatial_dims": 2, "out_channels": 2}
    values = replace(LABEL_MAPS, patch_size=[12, 12])
    with pytest.raises(
        ConfigError, match=r"\[12, 12\]: .*; \+model\.divisible_by=32 would have patches planned"
    ):
        build_network(segresnet, PLAIN_CONV, values)
    with pytest.raises(ConfigError, match=r"^model cannot take data\.patch_size=\[12, 12\]: [^;]*$"):
        build_network({**segresnet, "divisible_by": 8}, PLAIN_CONV, values)


class Half(UNet):
    """Returns logits in the type `dtype`; its first norm is in evaluation mode."""

    def __init__(self, *, dtype: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.dtype = getattr(torch, dtype)
        self.encoder[0][1].eval()

    def forward(self, x: torch.Tensor, stages: int = 0) -> Any:
        return super().forward(x).to(self.dtype)


class Wrong(Foldable):
    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.conv(x)

    def folded(self) -> Any:
        return self.conv


def test_faults_of_own_networks_and_layers_are_named():
    own = {**model(f"{__name__}.Half"), "dtype": "float32"}
    network = build_network(own, PLAIN_CONV, LABEL_MAPS)
    assert network.training and not network.encoder[0][1].training  # frozen by its author
    with pytest.raises(ConfigError, match=r"logits in floating point, it returns torch\.int64"):
        build_network({**own, "dtype": "int64"}, PLAIN_CONV, LABEL_MAPS)
    conv = {"_target_": f"{__name__}.Wrong", "_partial_": True}
    with pytest.raises(
        ConfigError, match=r"^conv: layer encoder\.0\.0: what folded\(\) of Wrong returns differs"
    ):
        build_network(model(), conv, LABEL_MAPS)
    unpadded = {"_target_": f"{__name__}.without_padding", "_partial_": True}
    with pytest.raises(ConfigError, match=r"^conv: with it, model cannot take data\.patch_size=\[8, 8\]"):
        build_network(model(), unpadded, LABEL_MAPS)


def without_padding(conv):
    conv.padding = (0, 0)
    return conv


def test_a_key_without_effect_is_refused():
    with pytest.raises(
        ConfigError, match=r"^conv\.where=encoder: conv=none changes no layer and has no keys"
    ):
        check_conv({**PLAIN_CONV, "where": "encoder"})
    check_conv(PLAIN_CONV)
