"""medconv/convs/swap.py: into networks of ours and MONAI's, and back to plain layers."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from monai.networks import nets
from torch import nn
from torch.nn.utils import parametrize

from medconv.convs import SwapReport, fold_convs, plain, swap_convs, transform
from medconv.networks import UNet

DOWN, UP, POINT = "down-sampling by its kernel", "transposed", "1x1"
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, int]]] = {
    "unet 3d": (lambda: UNet(3, 1, 2, (4, 6, 8), (2, (1, 2, 2))), 10, {DOWN: 2, UP: 2, POINT: 1}),
    "unet 2d": (lambda: UNet(2, 1, 2, (4, 8), (2,), kernel_size=(5, 3)), 6, {DOWN: 1, UP: 1, POINT: 1}),
    # Residual units: two convolutions, and a strided 3x3 or a 1x1 on the short cut; the last unit of the way up has one.
    "monai unet": (lambda: nets.UNet(3, 1, 2, (4, 8), (2,), num_res_units=2), 6, {POINT: 1, UP: 1}),
    "monai dynunet": (lambda: nets.DynUNet(3, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 6, 8]), 10, {POINT: 1, UP: 2}),
    # One stem, three blocks of two, one step down; norms of 8 groups.
    "monai segresnet": (
        lambda: nets.SegResNet(3, init_filters=8, blocks_down=(1, 1), blocks_up=(1,), upsample_mode="deconv"),
        8,
        {POINT: 2, UP: 1},
    ),
}


def convolutions(network: nn.Module) -> list[nn.Module]:
    kinds = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return [layer for layer in network.modules() if isinstance(layer, kinds)]


def image_for(network: nn.Module) -> torch.Tensor:
    two = any(isinstance(layer, nn.Conv2d) for layer in network.modules())
    return torch.randn(2, 1, *[8] * (2 if two else 3))


@pytest.fixture(params=NETWORKS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, int, dict[str, int]]:
    torch.manual_seed(0)
    build, swapped, kept = NETWORKS[request.param]
    return build(), swapped, kept


def test_counts_and_reasons(case: tuple[nn.Module, int, dict[str, int]]) -> None:
    network, swapped, kept = case
    report = swap_convs(network, transform)
    assert len(report.swapped) == swapped
    assert dict(Counter(report.kept.values())) == kept
    assert len(report.swapped) + len(report.kept) == len(convolutions(network))
    carry = {name for name, layer in network.named_modules() if parametrize.is_parametrized(layer)}
    assert carry == set(report.swapped)


def test_swapped_network_learns(case: tuple[nn.Module, int, dict[str, int]]) -> None:
    network, _, _ = case
    image = image_for(network)
    shape = network(image).shape
    swap_convs(network, transform)
    output = network(image)
    assert output.shape == shape
    output.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    assert any(name.endswith("parametrizations.weight.original") for name, _ in network.named_parameters())


def test_fold_leaves_a_plain_network_of_equal_output(case: tuple[nn.Module, int, dict[str, int]]) -> None:
    network, _, _ = case
    bare = deepcopy(network)
    image = image_for(network)
    swap_convs(network, transform)
    network(image)  # running statistics that are not those of the start
    network.eval()
    before, state = network(image).detach(), deepcopy(network.state_dict())

    folded = fold_convs(network)
    torch.testing.assert_close(folded(image), before, rtol=1e-5, atol=1e-5)
    assert not any(hasattr(layer, "parametrizations") for layer in folded.modules())
    assert not any("medconv.convs" in type(layer).__module__ for layer in folded.modules())
    assert {type(layer) for layer in convolutions(folded)} == {type(layer) for layer in convolutions(bare)}
    assert sorted(folded.state_dict()) == sorted(bare.state_dict())
    bare.load_state_dict(folded.state_dict())
    torch.testing.assert_close(bare.eval()(image), before, rtol=1e-5, atol=1e-5)

    with torch.no_grad():  # the copy shares nothing
        for parameter in folded.parameters():
            parameter.zero_()
    assert network.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    output = network(image)
    assert torch.equal(output, before)
    output.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_where_selects_by_name() -> None:
    network = UNet(2, 1, 2, (4, 8), (2,))
    report = swap_convs(network, transform, where=r"^encoder\.1")
    assert report.swapped == ["encoder.1.0", "encoder.1.3"]
    assert report.kept["encoder.0.0"] == r"not matched by '^encoder\\.1'"
    assert report.kept["down.0"] == DOWN  # the stronger reason stays
    assert not parametrize.is_parametrized(network.get_submodule("encoder.0.0"))


def test_report_is_one_line() -> None:
    report = swap_convs(UNet(2, 1, 2, (4, 8), (2,)), transform)
    assert str(report) == "6 convolutions swapped, 3 kept (1 down-sampling by its kernel, 1 transposed, 1 1x1)"
    assert str(SwapReport(["a"])) == "1 convolutions swapped, 0 kept"


@pytest.mark.parametrize(
    ("network", "where", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2)), None, r"no convolution of Sequential could be swapped: 0 .* 0 kept"),
        (nn.Sequential(nn.Conv2d(1, 2, 1), nn.ConvTranspose2d(2, 1, 3)), None, r"2 kept \(1 1x1, 1 transposed\)"),
        (nn.Sequential(nn.Conv2d(2, 2, 3)), "decoder", r"1 not matched by 'decoder'"),
        (nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Conv3d(1, 1, 2, 2)), None, r"1 grouped, 1 down-sampling by its"),
        (nn.Sequential(transform(nn.Conv2d(2, 2, 3))), None, r"1 parametrized already"),
    ],
)
def test_nothing_swapped_is_an_error(network: nn.Module, where: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swap_convs(network, transform, where)


def test_a_refused_layer_is_named() -> None:
    network = nn.ModuleDict({"body": nn.Sequential(nn.ReLU(), nn.Conv2d(2, 2, 4))})
    with pytest.raises(ValueError, match=r"layer body\.1: kernel_size must be odd.*\(4, 4\)"):
        swap_convs(network, transform)


def test_arguments_are_bound_by_partial() -> None:
    network = UNet(2, 1, 2, (4, 8), (2,))
    swap_convs(network, partial(transform, transform_channels=3))
    transforms = [p.shape for name, p in network.named_parameters() if name.endswith("original")]
    assert [shape[0] for shape in transforms] == [3] * 6


def test_any_module_may_stand_in_the_place() -> None:
    network = nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), nn.Conv2d(2, 1, 1))
    report = swap_convs(network, lambda conv: nn.Sequential(conv, nn.Dropout()))
    assert report.swapped == ["0.0"]
    assert isinstance(network[0][0], nn.Sequential) and isinstance(network[0][0][0], nn.Conv2d)
    assert network(torch.randn(1, 1, 4, 4)).shape == (1, 1, 2, 2)


def test_plain_changes_nothing() -> None:
    network = UNet(2, 1, 2, (4, 8), (2,))
    before, layers = deepcopy(network.state_dict()), list(network.modules())
    assert len(swap_convs(network, plain).swapped) == 6
    assert all(a is b for a, b in zip(network.modules(), layers, strict=True))
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_a_network_that_is_one_convolution() -> None:
    conv = nn.Conv2d(1, 2, 3)
    assert swap_convs(conv, transform).swapped == [""]
    assert sorted(conv.state_dict()) == ["bias", "parametrizations.weight.0.bank", "parametrizations.weight.original"]
    assert type(fold_convs(conv)) is nn.Conv2d
    with pytest.raises(ValueError, match="bare Conv2d cannot be replaced"):
        swap_convs(nn.Conv2d(1, 2, 3), lambda layer: nn.Sequential(layer))
