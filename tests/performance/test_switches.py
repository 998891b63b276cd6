"""medconv/performance/switches.py: what a network computes, and its parameter names, are those without the
switches.
"""

import logging
import shutil
from copy import deepcopy
from functools import partial

import pytest
import torch
from helpers.steps import assert_same_state, assert_same_step
from torch import Tensor, nn
from torch._dynamo.utils import counters

from medconv.convs import swap_convs, transform
from medconv.models.unet import UNet
from medconv.performance.switches import apply_switches, memory_format, to_memory_format

Case = tuple[nn.Module, Tensor, int]


@pytest.mark.parametrize("swapped", [False, True])
def test_channels_last_computes_the_same(case, swapped):
    plain, image, _ = case
    if swapped:
        swap_convs(plain, transform)
    network = apply_switches(deepcopy(plain), channels_last=True)
    layout = memory_format(True, image.ndim - 2)
    plain.eval(), network.eval()
    output = network(image.contiguous(memory_format=layout))
    torch.testing.assert_close(output, plain(image), rtol=1e-5, atol=1e-5)
    assert list(network.state_dict()) == list(plain.state_dict())
    if not swapped:
        kinds = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        layers = [layer for layer in network.modules() if isinstance(layer, kinds)]
        assert all(layer.weight.is_contiguous(memory_format=layout) for layer in layers)
        assert any(not layer.weight.is_contiguous() for layer in layers)


@pytest.mark.parametrize("shape", [(2, 6, 5), (2, 6, 5, 4)])
@pytest.mark.parametrize("channels", [1, 4])
def test_images_get_the_strides_of_the_format(shape, channels):
    """Also with one channel: a GPU's convolutions choose their format by the strides."""
    image = torch.rand(shape[0], channels, *shape[1:])
    last = to_memory_format(image, memory_format(True, len(shape) - 1))
    assert last.stride()[1] == 1 and last.stride()[-1] == channels
    assert torch.equal(last, image)
    assert to_memory_format(last, memory_format(True, len(shape) - 1)) is last
    assert to_memory_format(last, torch.contiguous_format).stride() == image.stride()


def test_channels_last_converts_2d_and_3d_layers_of_one_network():
    network = nn.ModuleList(
        [nn.Conv2d(2, 3, 3), nn.ConvTranspose2d(2, 3, 3), nn.Conv3d(2, 3, 3), nn.ConvTranspose3d(2, 3, 3)]
    )
    apply_switches(network, channels_last=True)
    for layer, layout in zip(network, [torch.channels_last] * 2 + [torch.channels_last_3d] * 2, strict=True):
        assert layer.weight.is_contiguous(memory_format=layout) and not layer.weight.is_contiguous()


def test_without_switches_the_network_stays_as_it_is():
    network = UNet(2, 1, 2, (4, 8), (2,))
    before = [type(layer) for layer in network.modules()]
    assert apply_switches(network, channels_last=False) is network
    assert [type(layer) for layer in network.modules()] == before
    assert all(p.is_contiguous() for p in network.parameters())
    assert network._compiled_call_impl is None


def test_compile_keeps_names_and_output(monkeypatch):
    """Without the C++ of the last stage, which takes long."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    counters.clear()
    plain, image = UNet(2, 1, 2, (4, 8), (2,)), torch.randn(2, 1, 4, 4)
    network = apply_switches(deepcopy(plain), channels_last=False, compile=True)
    assert list(network.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in network.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert_same_step(network, plain, image)
    assert_same_state(network, plain)
    assert counters["stats"]["unique_graphs"] == 1


def test_the_log_has_the_number_of_checkpointed_blocks(caplog):
    with caplog.at_level(logging.INFO):
        apply_switches(UNet(2, 1, 2, (4, 8), (2,)), channels_last=False, activation_checkpointing="blocks")
    assert "checkpointing 3 blocks" in caplog.text


@pytest.mark.parametrize("sync_batchnorm", [True, False])
def test_batch_norms_stay_for_sync_batchnorm_and_the_log_says_so(sync_batchnorm, caplog):
    network = UNet(2, 1, 2, (4, 8), (2,), norm="batch")
    with caplog.at_level(logging.INFO):
        apply_switches(network, channels_last=True, fast_norm=True, sync_batchnorm=sync_batchnorm)
    are_plain = any(type(layer) is nn.BatchNorm2d for layer in network.modules())
    assert are_plain == sync_batchnorm == ("batch norms stay as they are" in caplog.text)


def test_compile_without_a_compiler_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"compile=true: it needs a C\+\+ compiler"):
        apply_switches(nn.Identity(), channels_last=False, compile=True)


def test_memory_format_follows_the_dimensions():
    assert memory_format(False, 2) is memory_format(False, 3) is torch.contiguous_format
    assert (memory_format(True, 2), memory_format(True, 3)) == (torch.channels_last, torch.channels_last_3d)
