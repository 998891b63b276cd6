"""medconv/performance/switches.py: what a network computes, and its parameter names, are those without the
switches.
"""

import logging
import shutil
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from monai.networks import nets
from torch import Tensor, nn
from torch._dynamo.utils import counters

from medconv.convs import fold_convs, swap_convs, transform
from medconv.models.outputs import heads
from medconv.models.unet import UNet
from medconv.performance.checkpoint_blocks import apply_checkpointing
from medconv.performance.switches import apply_switches, memory_format
from medconv.utils.hardware import resolve_precision, warn_slow_cudnn

NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # build, spatial axes, blocks
    "unet 2d": (lambda: UNet(2, 1, 2, (4, 8), (2,)), 2, 3),
    "unet 3d": (lambda: UNet(3, 1, 2, (4, 6, 8), (2, (1, 2, 2))), 3, 5),
    "monai unet": (
        lambda: nets.UNet(3, 1, 2, (4, 8), (2,), num_res_units=2, norm="batch", dropout=0.3),
        3,
        2,
    ),
    "monai dynunet": (
        lambda: nets.DynUNet(
            2, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 6, 8], norm_name="batch", dropout=0.3
        ),
        2,
        5,
    ),
    "monai dynunet with heads": (
        lambda: nets.DynUNet(2, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 6, 8], deep_supervision=True),
        2,
        5,
    ),
    "monai segresnet": (
        lambda: nets.SegResNet(
            3, init_filters=8, blocks_down=(1, 1), blocks_up=(1,), norm="batch", dropout_prob=0.3
        ),
        3,
        3,
    ),
}
Case = tuple[nn.Module, Tensor, int]


@pytest.fixture(params=NETWORKS)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    build, spatial_dims, blocks = NETWORKS[request.param]
    return build(), torch.randn(2, 1, *[8] * spatial_dims), blocks


def one_step(network: nn.Module, image: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a step, always with the same draws of dropout."""
    torch.manual_seed(7)
    network.zero_grad()
    loss = torch.stack([head.square().mean() for head in heads(network(image), image.ndim - 2)]).sum()
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None
    }


def assert_same_state(network: nn.Module, other: nn.Module) -> None:
    state, expected = network.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def assert_same_step(network: nn.Module, plain: nn.Module, image: Tensor) -> None:
    (loss, grads), (expected, wanted) = one_step(network, image), one_step(plain, image)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def test_checkpointing_changes_no_loss_gradient_or_running_statistic(case: Case) -> None:
    plain, image, blocks = case
    network = deepcopy(plain)
    assert apply_checkpointing(network, "blocks") == blocks
    assert [n for n, _ in network.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for _ in range(2):  # the second step sees what the first left behind
        assert_same_step(network, plain, image)
        assert_same_state(network, plain)
    counts = [value for name, value in network.state_dict().items() if name.endswith("num_batches_tracked")]
    assert all(int(count) == 2 for count in counts)


def test_checkpointing_recomputes_blocks_and_only_in_training(case: Case) -> None:
    network, image, _ = case
    apply_checkpointing(network, "blocks")
    block = next(m for m in network.modules() if type(m).__name__.startswith("Checkpointed"))
    conv = next(m for m in block.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d)))
    calls: list[int] = []
    conv.register_forward_hook(lambda *_: calls.append(1))
    one_step(network, image)
    assert len(calls) == 2
    network.eval()(image)
    assert len(calls) == 3
    with torch.no_grad():
        network.train()(image)
    assert len(calls) == 4


def test_deepcopy_of_a_checkpointed_network_uses_its_own_weights(case: Case) -> None:
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


def test_a_block_is_the_smallest_module_of_two_spatial_convolutions() -> None:
    def wide() -> nn.Module:
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


def test_checkpointing_twice_is_checkpointing_once() -> None:
    network = UNet(2, 1, 2, (4, 8), (2,))
    assert (apply_checkpointing(network, "blocks"), apply_checkpointing(network, "blocks")) == (3, 0)
    network(torch.randn(1, 1, 4, 4)).sum().backward()


def test_checkpointing_allows_a_second_backward() -> None:
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


def test_checkpointing_leaves_cumulative_statistics_alone() -> None:
    block = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, momentum=None), nn.Conv2d(2, 1, 3))
    network = nn.Sequential(deepcopy(block))
    plain = nn.Sequential(block)
    assert apply_checkpointing(network, "blocks") == 1
    for image in torch.randn(3, 2, 1, 7, 7):
        assert_same_step(network, plain, image)
        assert_same_state(network, plain)
    assert network[0][1].momentum is None


def test_checkpointing_with_swapped_convolutions_and_autocast() -> None:
    plain, image = UNet(2, 1, 2, (4, 8), (2,)), torch.randn(2, 1, 8, 8)
    swap_convs(plain, transform)
    network = deepcopy(plain)
    assert apply_checkpointing(network, "blocks") == 3
    with torch.autocast("cpu", torch.bfloat16):
        (loss, grads), (expected, wanted) = one_step(network, image), one_step(plain, image)
    torch.testing.assert_close(loss, expected)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted[name], msg=name)
    plain.eval(), network.eval()
    torch.testing.assert_close(fold_convs(network)(image), plain(image), rtol=1e-5, atol=1e-5)


def test_checkpointing_inside_a_compiled_graph() -> None:
    """Without the C++ of the last stage: the graph is captured and split, its kernels run one by one."""
    torch.manual_seed(0)
    plain, image = UNet(2, 1, 2, (4, 8), (2,)), torch.randn(2, 1, 8, 8)
    network = deepcopy(plain)
    apply_checkpointing(network, "blocks")
    network.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    assert_same_step(network, plain, image)
    assert_same_state(network, plain)


@pytest.mark.parametrize("swapped", [False, True])
def test_channels_last_computes_the_same(case: Case, swapped: bool) -> None:
    plain, image, _ = case
    if swapped:
        swap_convs(plain, transform)
    network = apply_switches(
        deepcopy(plain), channels_last=True, compile=False, activation_checkpointing="none"
    )
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


def test_channels_last_serves_2d_and_3d_in_one_network() -> None:
    network = nn.ModuleList(
        [nn.Conv2d(2, 3, 3), nn.ConvTranspose2d(2, 3, 3), nn.Conv3d(2, 3, 3), nn.ConvTranspose3d(2, 3, 3)]
    )
    apply_switches(network, channels_last=True, compile=False, activation_checkpointing="none")
    for layer, layout in zip(network, [torch.channels_last] * 2 + [torch.channels_last_3d] * 2, strict=True):
        assert layer.weight.is_contiguous(memory_format=layout) and not layer.weight.is_contiguous()


def test_without_switches_nothing_is_touched() -> None:
    network = UNet(2, 1, 2, (4, 8), (2,))
    before = [type(layer) for layer in network.modules()]
    assert (
        apply_switches(network, channels_last=False, compile=False, activation_checkpointing="none")
        is network
    )
    assert [type(layer) for layer in network.modules()] == before
    assert all(p.is_contiguous() for p in network.parameters())
    assert network._compiled_call_impl is None


def test_checkpointing_says_how_many_blocks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        apply_switches(
            UNet(2, 1, 2, (4, 8), (2,)), channels_last=False, compile=False, activation_checkpointing="blocks"
        )
    assert "checkpointing 3 blocks" in caplog.text


def test_unknown_checkpointing_is_an_error() -> None:
    with pytest.raises(
        ValueError,
        match=r"perf\.activation_checkpointing must be one of .*'blocks', 'pointwise'\), got 'all'",
    ):
        apply_switches(nn.Identity(), channels_last=False, compile=False, activation_checkpointing="all")


def test_compile_keeps_names_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the C++ of the last stage, which takes long."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    counters.clear()
    plain, image = UNet(2, 1, 2, (4, 8), (2,)), torch.randn(2, 1, 4, 4)
    network = apply_switches(
        deepcopy(plain), channels_last=False, compile=True, activation_checkpointing="none"
    )
    assert list(network.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in network.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert_same_step(network, plain, image)
    assert_same_state(network, plain)
    assert counters["stats"]["unique_graphs"] == 1


def test_compile_without_a_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"perf\.compile=true: it needs a C\+\+ compiler"):
        apply_switches(nn.Identity(), channels_last=False, compile=True, activation_checkpointing="none")


def test_memory_format() -> None:
    assert memory_format(False, 2) is memory_format(False, 3) is torch.contiguous_format
    assert (memory_format(True, 2), memory_format(True, 3)) == (torch.channels_last, torch.channels_last_3d)


@pytest.mark.parametrize(
    "precision", ["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true", 16, 32, None]
)
def test_precision_that_was_chosen_stays(precision: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_precision(precision, "gpu") == precision
    if not str(precision).startswith("16"):
        assert resolve_precision(precision, "cpu") == precision


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", 16])
def test_fp16_needs_a_gpu(precision: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=rf"trainer\.precision={precision} needs a GPU"):
        resolve_precision(precision, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=rf"trainer\.precision={precision} needs a GPU"):
        resolve_precision(precision, "auto")


def test_auto_precision_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert [resolve_precision("auto", a) for a in ("auto", "gpu", "cuda")] == ["bf16-mixed"] * 3
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert resolve_precision("auto", "gpu") == "16-mixed"
    for capability in ("amx_bf16", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=capability: {name: True})
        assert resolve_precision("auto", "cpu") == "bf16-mixed"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert resolve_precision("auto", "cpu") == "32-true"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_precision("auto", "auto") == "32-true"


@pytest.mark.parametrize(
    ("version", "warns"), [(90701, False), (90800, True), (91002, True), (91500, False), (None, False)]
)
def test_slow_cudnn_is_named(
    version: int | None, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    warn_slow_cudnn()
    assert (f"cuDNN {version} has slow half-precision Conv3d" in caplog.text) == warns
