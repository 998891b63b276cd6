"""medconv/features/nnunet/network.py: plans that our U-Net cannot express, and plans of our U-Net."""

import pytest
from helpers import nnunet_models as models

from medconv.features.nnunet.network import NnUNet
from medconv.models.unet import UNet


def _configuration(name="turned"):
    return models.plans(name)["configurations"]["base"]


def test_old_and_new_plans_describe_the_same_network():
    new, old = NnUNet.of(_configuration()), NnUNet.of(_configuration("slices"))
    assert (new.channels, new.convs, new.decoder_convs) == ((4, 8, 8), (2, 1, 2), (1, 2))
    assert (old.channels, old.convs, old.decoder_convs) == ((4, 8, 8), (2, 1, 2), (1, 2))
    assert old.strides == ((1, 1), (2, 2), (2, 1)) and old.kernel_sizes == ((3, 3),) * 3


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("norm_op", "torch.nn.modules.normalization.GroupNorm", "norm_op=.*GroupNorm is not supported"),
        ("norm_op_kwargs", {"eps": 1e-3, "affine": True}, "norm_op_kwargs=.*0.001"),
        ("dropout_op", "torch.nn.Dropout3d", "dropout_op=torch.nn.Dropout3d is not supported, expected None"),
        ("nonlin", "os.system", "nonlin=os.system is not supported, expected torch.nn.LeakyReLU"),
        ("nonlin_kwargs", {"negative_slope": 0.2}, "nonlin_kwargs=.*0.2"),
        ("n_conv_per_stage_decoder", [2, 2], "n_conv_per_stage_decoder=.*expected as many"),
        ("strides", [[2, 2, 2]] * 3, "a first stage with stride 1"),
        ("features_per_stage", [4, 8], "needs 3 entries per stage"),
    ],
)
def test_other_layers_are_refused_by_name(key, value, expected):
    configuration = _configuration()
    configuration["architecture"]["arch_kwargs"][key] = value
    with pytest.raises(ValueError, match=expected):
        NnUNet.of(configuration)


def test_a_class_is_chosen_from_a_list_and_never_imported():
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
def test_other_residual_encoders_are_refused_by_name(key, value, expected):
    configuration = _configuration("residual")
    assert NnUNet.of(configuration).arguments["residual_blocks"] == [1, 2, 1]
    configuration["architecture"]["arch_kwargs"][key] = value
    with pytest.raises(ValueError, match=expected):
        NnUNet.of(configuration)


@pytest.mark.parametrize("residual_blocks", [None, [1, 2, 1, 5]])
@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_the_plan_of_our_network_describes_it(norm, residual_blocks):
    kernels = [(3, 3, 1), (3, 3, 3), 3]
    settings = {"norm": norm, "residual_blocks": residual_blocks, "strided": True}
    unet = UNet(3, 1, 2, models.CHANNELS, [(2, 2, 1), 2], kernels, convs_per_stage=1, **settings)
    plan = NnUNet.of_network(unet)
    assert plan.kernel_sizes[0] == (1, 3, 3) and plan.strides == ((1, 1, 1), (1, 2, 2), (2, 2, 2))
    assert plan.convs == ((1, 2, 1) if residual_blocks else (1, 1, 1)) and plan.decoder_convs == (1, 1)
    assert NnUNet.of({"architecture": plan.architecture}) == plan
