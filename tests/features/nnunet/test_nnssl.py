"""medconv/features/nnunet/nnssl.py: what a checkpoint of nnssl says of its network and preprocessing."""

import pytest
import torch
from helpers import nnunet_models as models

from medconv.features.nnunet import nnssl


def residual(**changed):
    """The network of the helper's `residual` model."""
    architecture = models.plans("residual")["configurations"]["base"]["architecture"]
    return {
        "arch_class_name": "ResidualEncoderUNet",
        "arch_kwargs": {**architecture["arch_kwargs"], **changed},
    }


def test_res_enc_l_by_its_name_and_images_that_were_not_resampled(tmp_path):
    unsampled = {"spacing": None, "use_mask_for_norm": True}
    plan = nnssl.read(models.write_nnssl(tmp_path / "l.pth", {"arch_class_name": "ResEncL"}, {}, **unsampled))
    assert plan is not None and plan.spacing_mm is None and plan.normalisation == ("zscore_nonzero",)
    assert plan.network.channels == (32, 64, 128, 256, 320, 320) and plan.network.residual
    assert plan.network.convs == (1, 3, 4, 6, 6, 6) and plan.network.strides[1:] == ((2, 2, 2),) * 5


def test_a_plain_network_counts_its_convolutions_as_blocks(tmp_path):
    convolutions = {"n_blocks_per_stage": [2, 2, 2], "n_conv_per_stage_decoder": [2, 2]}
    architecture = residual(**convolutions) | {"arch_class_name": "PlainConvUNet"}
    plan = nnssl.read(models.write_nnssl(tmp_path / "plain.pth", architecture, {}))
    assert plan is not None and not plan.network.residual and plan.network.convs == (2, 2, 2)
    assert plan.axes == (2, 1, 0) and plan.spacing_mm == (1.0, 1.5, 2.0)


@pytest.mark.parametrize("plan", [{"key_to_stem": "encoder.stem"}, {"architecture_name": "ResEncL"}, 3])
def test_files_without_a_plan_and_early_plans_say_nothing(tmp_path, plan):
    torch.save({"network_weights": {}, "nnssl_adaptation_plan": plan}, tmp_path / "early.pth")
    assert nnssl.read(tmp_path / "early.pth") is None


PRIMUS = {"arch_class_name": "PrimusM"}
RES_ENC_L = {"arch_class_name": "ResEncL"}


@pytest.mark.parametrize(
    ("architecture", "configuration", "message"),
    [
        (PRIMUS, {}, "arch_class_name=PrimusM is not supported, expected ResEncL, "),
        (residual(norm_op="torch.nn.GroupNorm"), {}, "norm_op=torch.nn.GroupNorm is not supported"),
        (residual(kernel_sizes=None), {}, "its nnssl_adaptation_plan is damaged"),
        (RES_ENC_L, {"normalization_schemes": ["Mine"]}, "normalization_schemes: Mine"),
    ],
)
def test_what_medconv_has_not_is_refused_with_the_file(tmp_path, architecture, configuration, message):
    path = models.write_nnssl(tmp_path / "other.pth", architecture, {}, **configuration)
    with pytest.raises(ValueError, match=rf"{path}.*{message}"):
        nnssl.read(path)
