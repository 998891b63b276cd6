"""medconv/performance/checkpointing.py: bit for bit the plain gradients, from fewer kept tensors."""

import pickle
from copy import deepcopy

import pytest
import torch
from monai.networks import nets
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.memory import step_memory
from medconv.convs import basis, swap_convs
from medconv.models.outputs import heads
from medconv.models.unet import UNet
from medconv.performance.checkpointing import apply_checkpointing
from medconv.performance.switches import apply_switches


def with_basis(network):
    swap_convs(network, basis, example=torch.zeros(2, 1, 16, 16, 16), spacing_mm=(1.0, 1.0, 1.0))
    return network


NETWORKS = {
    "unet batch": lambda: UNet(3, 1, 2, (8, 12, 16), (2, 2)),
    "unet instance": lambda: UNet(3, 1, 2, (8, 12, 16), (2, 2), norm="instance"),
    "unet 2d": lambda: UNet(2, 1, 2, (8, 12), (2,)),
    "unet basis": lambda: with_basis(UNet(3, 1, 2, (8, 12), (2,))),
    "monai unet": lambda: nets.UNet(3, 1, 2, (8, 12), (2,), num_res_units=2, norm="batch"),
    "dynunet": lambda: nets.DynUNet(3, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[8, 12, 16], res_block=True),
    "segresnet": lambda: nets.SegResNet(3, init_filters=8, blocks_down=(1, 1), blocks_up=(1,)),
    "basic unet 2d": lambda: nets.BasicUNet(2, 1, 2, (8, 8, 8, 8, 8, 8)),
}


def gradients(network, image, dtype=None):
    network.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        torch.manual_seed(5)
        loss = torch.stack(
            [head.float().square().mean() for head in heads(network(image), image.ndim - 2)]
        ).sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


def assert_equal(tensors, expected):
    """To the last bit."""
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_statistics_equal_the_plain_ones_to_the_last_bit(name, dtype):
    torch.manual_seed(0)
    plain = apply_switches(NETWORKS[name](), channels_last=True, fast_norm=True)
    network = deepcopy(plain)
    assert apply_checkpointing(network, "pointwise") == 1
    image = torch.randn(2, 1, *((64, 64) if "2d" in name else (16, 16, 16)))
    for _ in range(2):
        assert_equal(gradients(network, image, dtype), gradients(plain, image, dtype))
    state, plain_state = network.state_dict(), plain.state_dict()
    assert list(state) == list(plain_state)
    assert_equal(state.values(), plain_state.values())


@pytest.mark.parametrize(("norm", "share"), [("batch", 0.66), ("instance", 0.66)])
def test_checkpointing_saves_memory(norm, share):
    plain = apply_switches(UNet(3, 1, 2, (16, 32), (2,), norm=norm), channels_last=True, fast_norm=True)
    network, image = deepcopy(plain), torch.randn(2, 1, 16, 16, 16)
    apply_checkpointing(network, "pointwise")

    def measured(candidate):
        return step_memory(
            lambda: candidate(image).mean(), lambda: candidate(image).mean().backward(), image.device
        )

    checkpointed, full = measured(network), measured(plain)
    assert checkpointed["saved_bytes"] < share * full["saved_bytes"]
    assert checkpointed["peak_bytes"] < 0.9 * full["peak_bytes"]


def test_a_second_and_a_double_backward_equal_the_plain_ones():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 1, 3)).double()
    network = deepcopy(plain)
    apply_checkpointing(network, "pointwise")
    results = []
    for candidate in (network, plain):
        image = torch.randn(
            2, 1, 32, 32, dtype=torch.double, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        loss = candidate(image).square().mean()
        loss.backward(retain_graph=True)
        (first,) = torch.autograd.grad(loss, image, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), image)
        results.append((image.grad, first.detach(), second))
    for tensor, expected in zip(*results, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-15)


class _Rewrites(nn.Module):
    """Changes a tensor in place that a noted operation has read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = F.relu(x)
        x.mul_(2)
        return self.last(F.relu(self.last(y)))


def test_a_tensor_that_changes_in_place_raises():
    network = _Rewrites()
    apply_checkpointing(network, "pointwise")
    loss = network(torch.randn(1, 1, 64, 64)).mean()
    with pytest.raises(RuntimeError, match="changed in place; use activation_checkpointing=blocks"):
        loss.backward()


def test_an_activation_in_place_keeps_the_gradients():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 1, 3))
    network, image = deepcopy(plain), torch.randn(1, 1, 64, 64)
    apply_checkpointing(network, "pointwise")
    assert_equal(gradients(network, image), gradients(plain, image))


def test_evaluation_and_no_grad_work_as_without_checkpointing():
    network = UNet(2, 1, 2, (8, 12), (2,))
    apply_checkpointing(network, "pointwise")
    image = torch.randn(1, 1, 32, 32)
    with torch.no_grad():
        assert not network(image).requires_grad
    assert network.eval()(image).requires_grad


class _Chain(nn.Module):
    """Sums that refer back to one another, called by keyword."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, 1) for _ in range(depth))

    def forward(self, *, image: Tensor) -> Tensor:
        for conv in self.convs:
            image = image + conv(F.relu(image))
        return image


def test_a_deep_network_called_by_keyword_keeps_the_gradients():
    torch.manual_seed(0)
    plain, image = _Chain(400), torch.randn(1, 2, 48, 48) / 1000
    for conv in plain.convs:
        nn.init.normal_(conv.weight, std=0.01)
    network = deepcopy(plain)
    apply_checkpointing(network, "pointwise")
    for candidate in (network, plain):
        candidate(image=image).square().mean().backward()
    assert_equal([p.grad for p in network.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("mode", ["pointwise", "blocks"])
def test_a_checkpointed_network_can_be_pickled(mode):
    network = UNet(2, 1, 2, (8, 12), (2,))
    apply_checkpointing(network, mode)
    copy, image = pickle.loads(pickle.dumps(network)), torch.randn(2, 1, 32, 32)
    assert [type(m) for m in copy.modules()] == [type(m) for m in network.modules()]
    assert_equal(gradients(copy, image), gradients(network, image))
