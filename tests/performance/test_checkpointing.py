"""medconv/performance/checkpointing.py: loss, gradients and statistics are those without checkpointing."""

import pickle
from copy import deepcopy

import pytest
import torch
from helpers.steps import assert_same_state, assert_same_step, one_step
from monai.networks import nets
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.memory import step_memory
from medconv.convs import basis, fold_convs, swap_convs, transform
from medconv.models.outputs import heads
from medconv.models.unet import UNet
from medconv.performance.checkpointing import apply_checkpointing, compute_in_parts
from medconv.performance.switches import apply_switches

Case = tuple[nn.Module, Tensor, int]


def test_checkpointing_changes_no_loss_gradient_or_running_statistic(case):
    plain, image, blocks = case
    network = deepcopy(plain)
    assert apply_checkpointing(network, "blocks") == blocks
    assert [n for n, _ in network.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for _ in range(2):  # the second step starts from the statistics of the first
        assert_same_step(network, plain, image)
        assert_same_state(network, plain)
    counts = [value for name, value in network.state_dict().items() if name.endswith("num_batches_tracked")]
    assert all(int(count) == 2 for count in counts)


def test_checkpointing_recomputes_blocks_and_only_in_training(case):
    network, image, _ = case
    apply_checkpointing(network, "blocks")
    block = next(m for m in network.modules() if type(m).__name__.startswith("Checkpointed"))
    conv = next(m for m in block.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d)))
    calls = []
    conv.register_forward_hook(lambda *_: calls.append(1))
    one_step(network, image)
    assert len(calls) == 2
    network.eval()(image)
    assert len(calls) == 3
    with torch.no_grad():
        network.train()(image)
    assert len(calls) == 4


def test_deepcopy_of_a_checkpointed_network_uses_its_own_weights(case):
    plain, image, _ = case
    network = deepcopy(plain)
    apply_checkpointing(network, "blocks")
    copy = deepcopy(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    network.zero_grad()
    assert_same_step(copy, plain, image)
    assert_same_state(copy, plain)
    assert all(p.grad is None for p in network.parameters())


def test_a_block_is_the_smallest_module_of_two_spatial_convolutions():
    def wide():
        return nn.Conv2d(2, 2, 3, padding=1)

    lone, pair = (
        nn.Sequential(wide(), nn.Conv2d(2, 2, 1)),
        nn.Sequential(nn.Sequential(wide()), nn.ReLU(), wide()),
    )
    network = nn.Sequential(nn.ModuleList([lone]), pair, nn.Sequential(pair, wide()))
    assert apply_checkpointing(network, "blocks") == 1
    assert type(pair).__name__ == "CheckpointedSequential"
    assert not any(
        "Checkpointed" in type(m).__name__ for m in [network, lone, *pair.children(), network[0], network[2]]
    )


def test_a_dictionary_of_layers_is_no_block():
    """It is never called; what calls its layers is."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Conv2d(1, 1, 3, padding=1) for name in "ab"})

        def forward(self, x: Tensor) -> Tensor:
            return self.layers["b"](self.layers["a"](x))

    network = nn.Sequential(Network())
    assert apply_checkpointing(network, "blocks") == 1
    assert type(network[0]).__name__ == "CheckpointedNetwork"


def test_checkpointing_twice_is_checkpointing_once():
    network = UNet(2, 1, 2, (4, 8), (2,))
    assert (apply_checkpointing(network, "blocks"), apply_checkpointing(network, "blocks")) == (3, 0)
    network(torch.randn(1, 1, 4, 4)).sum().backward()


def test_checkpointing_allows_a_second_backward():
    plain, image = UNet(2, 1, 2, (4, 8), (2,)), torch.randn(2, 1, 4, 4)
    network = deepcopy(plain)
    apply_checkpointing(network, "blocks")
    for candidate in (network, plain):
        loss = candidate(image).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    for parameter, expected in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-5)
    assert_same_state(network, plain)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(2, momentum=None), nn.InstanceNorm2d(2, track_running_stats=True)]
)
def test_checkpointing_adds_a_batch_once_to_statistics(norm):
    block = nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.Conv2d(2, 1, 3))
    network = nn.Sequential(deepcopy(block))
    plain = nn.Sequential(block)
    assert apply_checkpointing(network, "blocks") == 1
    for image in torch.randn(3, 2, 1, 7, 7):
        assert_same_step(network, plain, image)
        assert_same_state(network, plain)
    assert network[0][1].momentum == norm.momentum


def test_checkpointing_with_swapped_convolutions_and_autocast():
    plain, image = UNet(2, 1, 2, (4, 8), (2,)), torch.randn(2, 1, 8, 8)
    swap_convs(plain, transform)
    network = deepcopy(plain)
    assert apply_checkpointing(network, "blocks") == 3
    with torch.autocast("cpu", torch.bfloat16):
        (loss, grads), (expected, expected_grads) = one_step(network, image), one_step(plain, image)
    torch.testing.assert_close(loss, expected)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], msg=name)
    plain.eval(), network.eval()
    torch.testing.assert_close(fold_convs(network)(image), plain(image), rtol=1e-5, atol=1e-5)


def test_checkpointing_inside_a_compiled_graph():
    """Without the C++ of the last stage: the graph is captured and split, its kernels run one by one."""
    torch.manual_seed(0)
    plain, image = UNet(2, 1, 2, (4, 8), (2,)), torch.randn(2, 1, 8, 8)
    network = deepcopy(plain)
    apply_checkpointing(network, "blocks")
    network.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    assert_same_step(network, plain, image)
    assert_same_state(network, plain)


@pytest.mark.parametrize("mode", ["none", "blocks"])
def test_a_batch_in_parts_has_the_loss_and_gradients_of_the_whole(mode):
    torch.manual_seed(0)
    plain = UNet(2, 1, 2, (4, 8), (2,), norm="instance").double()
    network = deepcopy(plain)
    compute_in_parts(network, samples_at_once=2)
    apply_checkpointing(network, mode)
    image = torch.randn(5, 1, 8, 8, dtype=torch.double)
    for each in (plain, network):
        each(image).softmax(dim=1).square().mean().sqrt().backward()
    for computed, expected in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(computed.grad, expected.grad, rtol=1e-12, atol=1e-14)


def test_a_batch_in_parts_adds_each_part_once_to_running_statistics():
    network = UNet(2, 1, 2, (4, 8), (2,))
    compute_in_parts(network, samples_at_once=1)
    network(torch.randn(3, 1, 8, 8)).sum().backward()
    counts = [value for name, value in network.state_dict().items() if name.endswith("num_batches_tracked")]
    assert set(map(int, counts)) == {3}


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
