"""medconv/models/pretrained/nnunet.py: plans that our U-Net cannot express, and weights that do not fit."""

from typing import Any

import pytest
import torch
from helpers import nnunet_models as models

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
    weights = unet_weights(state, network, (0, 1, 2))
    unet = UNet(3, 1, 3, network.channels, network.strides[1:], convs_per_stage=network.convs, strided=True)
    unet.load_state_dict(weights, strict=False)
    assert set(weights) == {name for name, _ in unet.named_parameters()}
    with pytest.raises(ValueError, match="holds encoder.stages.0.0.convs.0.norm.running_mean, which"):
        unet_weights(
            {**state, "encoder.stages.0.0.convs.0.norm.running_mean": torch.zeros(4)}, network, (0, 1, 2)
        )
    del state["decoder.transpconvs.1.bias"]
    with pytest.raises(ValueError, match="decoder.transpconvs.1.bias is missing"):
        unet_weights(state, network, (0, 1, 2))
