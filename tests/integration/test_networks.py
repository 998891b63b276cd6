"""conf/model: networks of MONAI and the residual encoder in 2D and 3D, with heads, switches and convolutions."""

from dataclasses import asdict

import pytest
import torch
from helpers.configs import derived
from omegaconf import OmegaConf

from medconv.config import conf_dir
from medconv.convs import fold_convs
from medconv.models.build import build_network
from medconv.models.outputs import full_resolution, heads
from medconv.performance.switches import apply_switches
from medconv.targets.label_map import LabelMapTargets
from medconv.training.losses.fit import FittedLoss
from medconv.training.losses.segmentation import DiceCrossEntropy

# Keys that make the option small, keys that give it heads, and the number of its heads.
NETWORKS = {
    "mednext": ({"init_filters": 4}, {"deep_supervision": True}, 5),
    "segresnet_ds": ({"init_filters": 4, "norm": "instance"}, {"dsdepth": 3}, 3),
    "swinunetr": ({"feature_size": 12, "depths": [1] * 4, "num_heads": [1] * 4}, {}, 1),
    "unetplusplus": ({"features": [4, 4, 8, 8, 8, 4]}, {"deep_supervision": True}, 4),
    "vnet": ({}, {}, 1),
    "resenc": ({"residual_blocks": [1, 2, 2]}, {}, 1),
}
LOSS = FittedLoss(DiceCrossEntropy(), LabelMapTargets.of_classes(["background", "a", "b"]), 2)


def built(name, dims, more, conv="none", **keys):
    """The network of an option as a run builds it, and images for it.

    V-Net normalises the eight deepest voxels of a batch: with two, rounding alone turns its gradients.
    """
    patch = {"swinunetr": [64, 32, 32]}.get(name, [32, 32, 32])[:dims]
    values = derived(
        spatial_dims=dims,
        patch_size=patch,
        spacing_mm=[1.0, 1.0, 3.0][:dims],
        channels=[4, 6, 8],
        strides=[[2] * dims] * 2,
        kernel_sizes=[[3] * dims] * 3,
    )
    files = {"model": f"model/{name}.yaml", "conv": f"conv/{conv}.yaml"}
    options = {group: OmegaConf.load(conf_dir() / file) for group, file in files.items()}
    node = OmegaConf.merge(
        options, {"model": {**NETWORKS[name][0], **more}, "conv": keys, "derived": asdict(values)}
    )
    plain = OmegaConf.to_container(node, resolve=True)
    torch.manual_seed(0)
    return build_network(plain["model"], plain["conv"], values), torch.randn(2, 1, *patch)


def gradients(network, image):
    torch.manual_seed(1)  # of dropout
    LOSS.spatial_dims = image.ndim - 2
    LOSS(network.train()(image), (image > 1).long()).backward()
    return [p.grad for p in network.parameters()]


def as_one(parts):
    return torch.cat([part.flatten() for part in parts])


# the dearest in 3D by night: what differs between 2D and 3D are MONAI's own layers
BY_NIGHT = [("vnet", 3), ("swinunetr", 3), ("unetplusplus", 3)]


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        pytest.param(name, dims, marks=[pytest.mark.slow] if (name, dims) in BY_NIGHT else [])
        for name in NETWORKS
        for dims in (2, 3)
    ],
)
def test_every_head_is_trained_and_the_finest_is_what_validation_sees(name, dims):
    _, with_heads, number = NETWORKS[name]
    network, image = built(name, dims, with_heads)
    outputs = heads(network.train()(image), dims)
    sizes = [output.shape[2:] for output in outputs]
    assert len(outputs) == number and sizes == sorted(sizes, reverse=True) and sizes[0] == image.shape[2:]
    assert all(output.shape[1] == 3 for output in outputs)
    if name != "vnet":  # others are the same in both modes: neither dropout nor batch norm
        torch.testing.assert_close(full_resolution(network.eval()(image)), outputs[0])
    assert all(gradient is not None for gradient in gradients(network, image))  # DDP waits for all
    if number > 1:
        network, image = built(name, dims, {})
        assert all(gradient is not None for gradient in gradients(network, image))


@pytest.mark.parametrize("mode", ["none", "blocks", "pointwise"])
@pytest.mark.parametrize("name", NETWORKS)
def test_switches_change_no_gradient(name, mode):
    network, image = built(name, 2, NETWORKS[name][1])
    switched, _ = built(name, 2, NETWORKS[name][1])
    apply_switches(switched, channels_last=True, fast_norm=True, activation_checkpointing=mode)
    ours, plain = (as_one(gradients(each, image)) for each in (switched, network))
    assert (ours - plain).norm() < 1e-3 * plain.norm()


@pytest.mark.parametrize("name", ["mednext", "segresnet_ds", "swinunetr", "resenc"])
def test_a_prior_replaces_their_convolutions_and_folds_away(name):
    network, image = built(name, 2, {}, "smooth", throughout=True)
    assert sum("parametrizations" in key for key in network.state_dict()) >= 10
    plain = fold_convs(network.eval())
    assert not any("parametrizations" in key for key in plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(plain(image), network(image), rtol=1e-4, atol=1e-4)


def test_dropout_of_vnet_drops_channels_in_2d():
    network, _ = built("vnet", 2, {"dropout_prob_up": [0.9, 0.9]})
    drop = network.train().get_submodule("up_tr256.dropout2")
    kept = drop(torch.ones(4, 64, 2, 2)).flatten(2)
    assert (kept == kept[..., :1]).all() and all(0 < sample.count_nonzero() < 128 for sample in kept)
