"""medconv/models/build.py: `model`, its `conv` and pretrained weights in one order, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.utils.parametrize import is_parametrized

from medconv.config import ConfigError
from medconv.models import Encoder, UNet
from medconv.models.build import build_network, model_of

PATCH = (8, 8)


def config(
    target: str = "medconv.models.UNet", conv: dict[str, Any] | None = None, **derived: Any
) -> dict[str, Any]:
    network = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": [4, 8], "strides": [2]}
    return {
        "model": {"_target_": target, **network},
        "conv": {"_target_": "medconv.convs.basis", "_partial_": True, "where": "encoder", **(conv or {})},
        "derived": {"num_channels": 1, "num_classes": 2, "per_voxel": True, **derived},
    }


@pytest.mark.parametrize("init_from_weights", [True, False])
def test_pretrained_weights_are_loaded_before_the_swap_only_if_conv_projects_them(
    init_from_weights: bool,
) -> None:
    swapped_when_loading = []
    network = build_network(
        config(conv={"init_from_weights": init_from_weights}),
        PATCH,
        load=lambda network: swapped_when_loading.append(is_parametrized(network.encoder[0][0])),
    )
    assert swapped_when_loading == [not init_from_weights]
    assert isinstance(network, UNet) and network.training
    assert is_parametrized(network.encoder[1][0]) and not is_parametrized(network.decoder[0][0])


@pytest.mark.parametrize(
    ("values", "patch_size", "message"),
    [
        (
            config(),
            (7, 8),
            r"^model cannot take data\.patch_size=\[7, 8\]: the spatial size must be divisible",
        ),
        (
            config(num_classes=3),
            PATCH,
            r"logits of shape \(1, 3, 8, 8\) .* returns \(1, 2, 8, 8\); model=custom",
        ),
        (config(per_voxel=False), PATCH, r"logits of shape \(1, 2\) .*; model=resnet, densenet"),
        (config(conv={"where": "stem"}), PATCH, r"^conv: .* not matched by 'stem'"),
    ],
    ids=["patch size", "classes", "segmentation network for image labels", "no layer to swap"],
)
def test_a_network_that_does_not_fit_the_task_is_refused(
    values: dict[str, Any], patch_size: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_network(values, patch_size)


def test_image_level_targets_replace_our_unet_with_its_encoder() -> None:
    segmentation, image_level = config(), config(per_voxel=False)
    assert model_of(segmentation) == segmentation["model"]
    assert model_of(image_level) == {**image_level["model"], "_target_": "medconv.models.Encoder"}
    other = config("monai.networks.nets.UNet", per_voxel=False)
    assert model_of(other) == other["model"]
    assert isinstance(build_network({**image_level, "model": model_of(image_level)}, PATCH), Encoder)
