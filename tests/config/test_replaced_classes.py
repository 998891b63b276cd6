"""medconv/config/compose.py: what a class in the place of an option's own keeps of its keys."""

import sys

import pytest
from helpers.configs import composed as config_of

NETWORK = """
from torch import nn
class Net(nn.Module):
    def __init__(self, in_channels, out_channels, width=4, norm=None): super().__init__()
"""


def test_other_classes_get_no_keys_of_the_options_they_replace(tmp_path, monkeypatch):
    """Named on the command line or by an experiment; keys that these set stay, so that wrong ones fail."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "another_own.py").write_text(
        NETWORK + "class Wide(Net):\n    def __init__(self, **more): super().__init__(**more)\n"
        "def swap(conv, share=None, extent_mm=None): return conv\n"
    )
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        "# @package _global_\nmodel: {_target_: another_own.Net, width: 8, strided: true}\n"
    )
    config = config_of("experiment=mine", "--config-dir", str(tmp_path))
    assert sorted(config.model) == ["_target_", "in_channels", "out_channels", "strided", "width"]
    assert "strides" in config_of("model._target_=another_own.Wide").model  # it takes any
    conv = config_of("conv._target_=another_own.swap", "conv.length_mm=3").conv
    assert sorted(conv) == ["_partial_", "_target_", "length_mm", "share", "where"]
    optimizer = config_of("optimizer=sgd", "optimizer._target_=torch.optim.RMSprop").optimizer
    assert sorted(optimizer) == ["_partial_", "_target_"]
    assert "loss" not in config_of("~loss")
    monai = config_of("model._target_=monai.networks.nets.Unet", "conv.share=0.5")
    assert monai.conv._target_ == "medconv.convs.smooth" and monai.conv.share == 0.5


@pytest.mark.parametrize(
    ("arguments", "group", "expected"),
    [
        # kernel_size has a default, and another form than the plan's one kernel per stage
        (
            ["model._target_=monai.networks.nets.AttentionUnet"],
            "model",
            ["channels", "in_channels", "out_channels", "spatial_dims", "strides"],
        ),
        # with defaults in MONAI; the data has other numbers
        (
            ["model._target_=monai.networks.nets.SegResNet"],
            "model",
            ["in_channels", "out_channels", "spatial_dims"],
        ),
        (["optimizer._target_=torch.optim.Muon"], "optimizer", []),  # lr: null is for our Muon
        (["optimizer._target_=torch.optim.Muon", "optimizer.lr=0.1"], "optimizer", ["lr"]),
        (["optimizer=adamw", "optimizer._target_=torch.optim.Adam"], "optimizer", ["lr", "weight_decay"]),
        (["augmentation._target_=monai.transforms.Compose"], "augmentation", []),
        (["scheduler._target_=medconv.training.optim.lr_schedulers.poly"], "scheduler", ["warmup_steps"]),
        (
            ["loss=tversky", "loss._target_=monai.losses.DiceLoss"],
            "loss",
            ["include_background", "sigmoid", "softmax", "to_onehot_y"],
        ),
        (
            ["early_stopping=patience", "early_stopping._target_=lightning.pytorch.callbacks.EarlyStopping"],
            "early_stopping",
            ["min_delta", "mode", "monitor", "patience"],
        ),
    ],
)
def test_a_class_keeps_what_it_needs_and_what_describes_the_data(arguments, group, expected):
    """For everything else it has defaults of its own; with arguments like those of ours it keeps all."""
    node = config_of(*arguments)[group]
    assert sorted(key for key in node if not key.startswith("_")) == expected


def test_what_a_class_needs_is_kept_unless_it_is_null(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rule.py").write_text("def rule(params, lr, weight_decay): ...\n")
    node = config_of("optimizer._target_=own_rule.rule").optimizer
    assert "lr" not in node and node.weight_decay == 0.01


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "smooth"),
        (["model=segresnet"], "plain"),
        (["experiment=nnunet"], "plain"),
        (["experiment=nnunet", "conv=acs"], "acs"),
        (["conv=none", "model=customconv"], "plain"),
        (["model._target_=medconv.features.image_level.encoder.Encoder"], "smooth"),
        (["model._target_=monai.networks.nets.Unet"], "plain"),
        (["model._target_=monai.networks.nets.Unet", "conv=smooth"], "smooth"),
    ],
)
def test_which_convolution_is_the_default(arguments, expected):
    """Our U-Net's is smooth; what has its own first weights, or nnU-Net's recipe, keeps them."""
    assert config_of(*arguments).conv._target_ == f"medconv.convs.{expected}"


def test_a_subclass_of_our_network_keeps_its_convolution(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub_unet.py").write_text(
        "from medconv.models import UNet\nclass Net(UNet): ...\n" + NETWORK.replace("Net", "Other")
    )
    assert config_of("model._target_=sub_unet.Net").conv._target_ == "medconv.convs.smooth"
    assert config_of("model._target_=sub_unet.Other").conv._target_ == "medconv.convs.plain"
    assert (
        config_of("model._target_=medconv.features.monai_networks.networks.DenseNet").conv._target_
        == "medconv.convs.plain"
    )
