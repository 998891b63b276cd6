"""medconv/features/pretrained/nnunet_names.py: weights of nnU-Net by our names, and ours by nnU-Net's."""

import numpy as np
import pytest
import torch
from helpers import nnunet_models as models
from helpers.pretrained import DERIVED, UNET_LAYERS
from torch import nn

from medconv.features.nnunet.network import NnUNet
from medconv.features.pretrained.load import load
from medconv.features.pretrained.nnunet_names import nnunet_state, unet_weights
from medconv.models.unet import UNet


def test_every_tensor_is_accounted_for():
    network, state = (
        NnUNet.of(models.plans("turned")["configurations"]["base"]),
        models.state_dict("turned", 1),
    )
    weights, unknown = unet_weights(state, (0, 1, 2))
    unet = UNet(3, 1, 3, network.channels, network.strides[1:], convs_per_stage=network.convs, strided=True)
    unet.load_state_dict(weights, strict=False)
    assert set(weights) == {name for name, _ in unet.named_parameters()} and not unknown
    others = {"encoder.stages.0.0.convs.0.norm.counter": torch.zeros(4), "mask_token": torch.zeros(4)}
    assert unet_weights({**state, **others}, (0, 1, 2))[1] == list(others)


@pytest.mark.parametrize("prefix", ["", "network_weights.", "network_weights.module."])
def test_weights_of_a_pretrained_encoder_are_loaded_by_name(tmp_path, prefix):
    """As nnssl publishes them: the encoder, some also with a decoder of another task; axes from z to x."""
    state = {n: v for n, v in models.state_dict("residual", 1).items() if not n.startswith("decoder.seg")}
    state["encoder.stem.convs.0.conv.weight"] = torch.rand(4, 1, 1, 3, 3)
    content = {"logging": [np.float32(0.5)], "nnssl_adaptation_plan": {"key_to_stem": "encoder.stem"}}
    for name, value in {**state, "mask_token": torch.zeros(1)}.items():
        node = content
        *parents, last = [*filter(None, prefix.split(".")), name]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    torch.save(content, tmp_path / "pretrained.pth")
    kernels = [(3, 3, 1), (3, 3, 3), (3, 3, 3)]
    settings = {"residual_blocks": [1, 2, 1], "convs_per_stage": 1, "strided": True, "norm": "instance"}
    unet = UNet(3, 1, 3, models.CHANNELS, [(2, 2, 1), (2, 2, 2)], kernels, **settings)
    report = load(unet, tmp_path / "pretrained.pth", DERIVED, UNET_LAYERS)
    assert list(report.random) == ["head.weight", "head.bias"] and list(report.unused) == ["mask_token"]
    stem = state["encoder.stem.convs.0.conv.weight"].permute(0, 1, 4, 3, 2)
    loaded_stem = unet.state_dict()["encoder.0.0.0.weight"]  # scaled, since a norm follows
    torch.testing.assert_close(loaded_stem / loaded_stem.norm(), stem / stem.norm())


def test_a_network_with_nnunets_own_names_takes_them_with_our_axes(tmp_path):
    """Such as one of dynamic_network_architectures, trained here by `model._target_`; axes from z to x."""
    state = {name: value for name, value in models.state_dict("turned", 1).items() if "stages" in name}
    network = nn.Module()
    for name, value in state.items():
        node = network
        *parents, last = name.split(".")
        for parent in parents:
            if not hasattr(node, parent):
                node.add_module(parent, nn.Module())
            node = node.get_submodule(parent)
        turned = value.permute(0, 1, 4, 3, 2) if value.ndim == 5 else value
        node.register_buffer(last, torch.zeros_like(turned))
    kernel = "encoder.stages.0.0.convs.0.conv.weight"
    layer = network.get_submodule(kernel.rpartition(".")[0])
    layer.weight = nn.Parameter(layer._buffers.pop("weight"))
    torch.save(state, tmp_path / "nnunet.pth")
    report = load(network, tmp_path / "nnunet.pth", DERIVED)
    assert not report.random and not report.unused
    assert torch.equal(network.state_dict()[kernel], state[kernel].permute(0, 1, 4, 3, 2))


@pytest.mark.parametrize("name", ["turned", "thick", "residual"])
def test_our_weights_have_all_names_and_values_of_nnunet(name):
    """All but biases before norms and heads of coarser stages, which are 0."""
    expected = models.state_dict(name, 1)
    weights, _ = unet_weights(expected)
    state = nnunet_state(weights)
    assert {key: value.shape for key, value in state.items()} == {
        key: value.shape for key, value in expected.items()
    }
    for key, value in state.items():
        is_zero = "seg_layers.0" in key or key.endswith(("conv.bias", "all_modules.0.bias"))
        torch.testing.assert_close(value, torch.zeros_like(value) if is_zero else expected[key])


def test_weights_of_batch_norms_go_both_ways():
    unet = UNet(2, 1, 2, (4, 8), [2], strided=True, norm="batch", residual_blocks=[1, 1], convs_per_stage=1)
    weights = {name: torch.rand_like(value.float()) for name, value in unet.state_dict().items()}
    back, unknown = unet_weights(nnunet_state(weights))
    assert not unknown
    torch.testing.assert_close(back, weights)


def test_a_bias_before_a_batch_norm_shifts_its_running_mean():
    layer = "encoder.stages.0.0.convs.0"
    state = {f"{layer}.conv.bias": torch.tensor([0.5]), f"{layer}.norm.running_mean": torch.tensor([2.0])}
    weights, _ = unet_weights(state)
    assert weights["encoder.0.1.running_mean"].tolist() == [1.5]
