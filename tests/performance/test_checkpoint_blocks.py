"""medconv/performance/checkpointing.py: loss, gradients and statistics are those without checkpointing."""

from copy import deepcopy

import pytest
import torch
from helpers.steps import assert_same_state, assert_same_step, one_step
from torch import Tensor, nn

from medconv.convs import fold_convs, swap_convs, transform
from medconv.models.unet import UNet
from medconv.performance.checkpointing import apply_checkpointing, compute_in_parts

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


def test_checkpointing_leaves_cumulative_statistics_alone():
    block = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, momentum=None), nn.Conv2d(2, 1, 3))
    network = nn.Sequential(deepcopy(block))
    plain = nn.Sequential(block)
    assert apply_checkpointing(network, "blocks") == 1
    for image in torch.randn(3, 2, 1, 7, 7):
        assert_same_step(network, plain, image)
        assert_same_state(network, plain)
    assert network[0][1].momentum is None


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
