"""medconv/models/pretrained/nnunet.py: plans that our U-Net cannot express, and weights that do not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import nnunet_models as models
from helpers.pretrained import DERIVED, UNET_LAYERS

from medconv.models.pretrained.load import load
from medconv.models.pretrained.nnunet import NnUNet, unet_weights
from medconv.models.unet import UNet


def _configuration(name: str = "turned") -> dict[str, Any]:
    return models.plans(name)["configurations"]["base"]  # type: ignore[no-any-return]


def test_old_and_new_plans_describe_the_same_network() -> None:
    new, old = NnUNet.of(_configuration()), NnUNet.of(_configuration("slices"))
    assert (new.channels, new.convs, new.decoder_convs) == ((4, 8, 8), (2, 1, 2), (1, 2))
    assert (old.channels, old.convs, old.decoder_convs) == ((4, 8, 8), (2, 1, 2), (1, 2))
    assert old.strides == ((1, 1), (2, 2), (2, 1)) and old.kernel_sizes == ((3, 3),) * 3


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("norm_op", "torch.nn.modules.batchnorm.BatchNorm3d", "norm_op=.*BatchNorm3d is not supported"),
        ("norm_op_kwargs", {"eps": 1e-3, "affine": True}, "norm_op_kwargs=.*0.001"),
        ("dropout_op", "torch.nn.Dropout3d", "dropout_op=torch.nn.Dropout3d is not supported, expected None"),
        ("nonlin", "os.system", "nonlin=os.system is not supported, expected torch.nn.LeakyReLU"),
        ("nonlin_kwargs", {"negative_slope": 0.2}, "nonlin_kwargs=.*0.2"),
        ("n_conv_per_stage_decoder", [2, 2], "n_conv_per_stage_decoder=.*expected as many"),
        ("strides", [[2, 2, 2]] * 3, "a first stage with stride 1"),
        ("features_per_stage", [4, 8], "needs 3 entries per stage"),
    ],
)
def test_other_layers_are_refused_by_name(key: str, value: Any, expected: str) -> None:
    configuration = _configuration()
    configuration["architecture"]["arch_kwargs"][key] = value
    with pytest.raises(ValueError, match=expected):
        NnUNet.of(configuration)


def test_a_class_is_chosen_from_a_list_and_never_imported() -> None:
    configuration = _configuration()
    configuration["architecture"]["network_class_name"] = "os.system"
    with pytest.raises(ValueError, match="os.system is not supported, expected PlainConvUNet or Resid"):
        NnUNet.of(configuration)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("n_conv_per_stage_decoder", [1, 2], "n_conv_per_stage_decoder=.*expected as many in each"),
        ("squeeze_excitation", True, "squeeze_excitation=True is not supported"),
        ("stochastic_depth_p", 0.1, "stochastic_depth_p=0.1 is not supported"),
        ("bottleneck_channels", 4, "bottleneck_channels=4 is not supported"),
    ],
)
def test_other_residual_encoders_are_refused_by_name(key: str, value: Any, expected: str) -> None:
    configuration = _configuration("residual")
    assert NnUNet.of(configuration).arguments["residual_blocks"] == [1, 2, 1]
    configuration["architecture"]["arch_kwargs"][key] = value
    with pytest.raises(ValueError, match=expected):
        NnUNet.of(configuration)


def test_every_tensor_is_accounted_for() -> None:
    network, state = NnUNet.of(_configuration()), models.state_dict("turned", 1)
    weights, unknown = unet_weights(state, (0, 1, 2))
    unet = UNet(3, 1, 3, network.channels, network.strides[1:], convs_per_stage=network.convs, strided=True)
    unet.load_state_dict(weights, strict=False)
    assert set(weights) == {name for name, _ in unet.named_parameters()} and not unknown
    others = {"encoder.stages.0.0.convs.0.norm.running_mean": torch.zeros(4), "mask_token": torch.zeros(4)}
    assert unet_weights({**state, **others}, (0, 1, 2))[1] == list(others)


@pytest.mark.parametrize("prefix", ["", "network_weights.", "network_weights.module."])
def test_weights_of_a_pretrained_encoder_are_loaded_by_name(tmp_path: Path, prefix: str) -> None:
    """As nnssl publishes them: the encoder, some also with a decoder of another task; axes from z to x."""
    state = {n: v for n, v in models.state_dict("residual", 1).items() if not n.startswith("decoder.seg")}
    state["encoder.stem.convs.0.conv.weight"] = torch.rand(4, 1, 1, 3, 3)
    content = {"logging": [np.float32(0.5)], "nnssl_adaptation_plan": {"key_to_stem": "encoder.stem"}}
    for name, value in {**state, "mask_token": torch.zeros(1)}.items():
        node: dict[str, Any] = content
        *parents, last = [*filter(None, prefix.split(".")), name]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    torch.save(content, tmp_path / "pretrained.pth")
    kernels = [(3, 3, 1), (3, 3, 3), (3, 3, 3)]
    settings: Any = {"residual_blocks": [1, 2, 1], "convs_per_stage": 1, "strided": True, "norm": "instance"}
    unet = UNet(3, 1, 3, models.CHANNELS, [(2, 2, 1), (2, 2, 2)], kernels, **settings)
    report = load(unet, tmp_path / "pretrained.pth", DERIVED, UNET_LAYERS)
    assert list(report.random) == ["head.weight", "head.bias"] and list(report.unused) == ["mask_token"]
    stem = state["encoder.stem.convs.0.conv.weight"].permute(0, 1, 4, 3, 2)
    torch.testing.assert_close(unet.state_dict()["encoder.0.0.0.weight"], stem)
