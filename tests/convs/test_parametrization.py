"""medconv/convs/parametrization.py: how a convolution gets a computed weight, over all that have one."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from helpers.conv_family import CONV, FACTORISED, WEIGHT_PRIORS, build, dense_weight, dims_of
from torch import Tensor, nn
from torch.nn import functional as F

from medconv.convs import (
    basis,
    bottleneck,
    fold_convs,
    masked,
    se,
    separable,
    smooth,
    spacing,
    swap_convs,
    transform,
)
from medconv.convs.parametrization import UnsuitableLayerError, rms

Make = Callable[[nn.Conv2d], nn.Module]
PRIORS = [(name, dims) for name in WEIGHT_PRIORS for dims in dims_of(name)]
LINEAR = [*PRIORS, *((name, dims) for name in FACTORISED for dims in dims_of(name))]


@pytest.mark.parametrize(("name", "dims"), LINEAR)
def test_a_new_kernel_has_the_variance_of_the_old_one(name, dims):
    conv = CONV[dims](16, 24, 3, padding=1)
    with torch.no_grad():
        conv.weight.normal_(std=0.37, generator=torch.Generator().manual_seed(1))
    fan = conv.weight[0].numel()
    power = rms(conv.weight) ** 2 * fan
    module = build(name, dims, conv=conv)
    weight = dense_weight(name, module)
    # Equal per weight; `spacing` has another number of taps, and keeps the variance of the output.
    assert rms(weight) ** 2 * weight[0].numel() == pytest.approx(power, rel=1e-4)
    assert abs(float(weight.double().mean())) < 0.1 * 0.37


@pytest.mark.parametrize(("name", "dims"), LINEAR)
def test_new_weights_are_random_unless_init_from_weights(name, dims):
    conv = CONV[dims](4, 6, 3, padding=1)
    first, second = (build(name, dims, seed, deepcopy(conv)) for seed in (0, 1))
    assert not torch.allclose(dense_weight(name, first), dense_weight(name, second))
    first, second = (build(name, dims, seed, deepcopy(conv), init_from_weights=True) for seed in (0, 1))
    torch.testing.assert_close(dense_weight(name, first), dense_weight(name, second))


@pytest.mark.parametrize(("name", "dims"), [case for case in LINEAR if case[0] != "spacing"])
def test_init_from_weights_reproduces_a_kernel_of_the_prior(name, dims):
    kernel = dense_weight(name, build(name, dims)).float()
    conv = CONV[dims](4, 6, 3, padding=1)
    with torch.no_grad():
        conv.weight.copy_(kernel)
    module = build(name, dims, conv=conv, init_from_weights=True)
    torch.testing.assert_close(dense_weight(name, module).float(), kernel, rtol=1e-4, atol=1e-5)
    assert module.approximation_error < 1e-5


EXACT = ("spacing", "smooth", "share")  # which every kernel fits


@pytest.mark.parametrize(("name", "dims"), [case for case in PRIORS if case[0] not in EXACT])
def test_init_from_weights_takes_the_nearest_kernel_of_the_prior(name, dims):
    """The error is orthogonal to every direction in which the parameters can change the kernel."""
    conv = CONV[dims](4, 6, 3, padding=1)
    weight = conv.weight.detach().double()
    module = build(name, dims, conv=conv, init_from_weights=True).double()
    error = module.weight - weight
    relative = float(error.detach().norm() / weight.norm())
    assert 0.05 < relative < 1 and module.approximation_error == pytest.approx(relative, rel=1e-4)
    original = module.parametrizations.weight.original
    (slope,) = torch.autograd.grad(error.square().sum(), original)
    assert float(slope.abs().max()) < 1e-5


@pytest.mark.parametrize("make", [bottleneck, separable, basis])
def test_a_layer_of_zeros_still_learns(make):
    conv = nn.Conv2d(4, 4, 3, padding=1)
    nn.init.zeros_(conv.weight)
    module = make(conv)
    output = module(torch.randn(1, 4, 5, 5))
    deviation = output.detach() - output.detach().mean((0, 2, 3), keepdim=True)
    assert float(deviation.abs().max()) < 1e-6  # only the bias
    output.sum().backward()
    assert any(float(p.grad.abs().max()) > 0 for p in module.parameters() if p.ndim > 1)


@pytest.mark.parametrize(
    "refused",
    [
        lambda conv: transform(conv, bank=torch.zeros(4, 4, 3, 3)),
        lambda conv: masked(conv, mask=torch.zeros(3, 3)),
        lambda conv: basis(conv, bank=torch.zeros(1, 3, 3)),
        lambda conv: spacing(conv),
        lambda conv: spacing(conv, spacing_mm=(1.0, 5.0)),
    ],
)
def test_a_refused_layer_is_unchanged(refused):
    conv = nn.Conv2d(4, 4, 3)
    before = deepcopy(conv.state_dict())
    with pytest.raises(ValueError, match="every weight zero|spacing_mm is needed|no padding"):
        refused(conv)
    assert type(conv) is nn.Conv2d and conv.state_dict().keys() == before.keys()
    assert conv.kernel_size == (3, 3) and torch.equal(conv.weight, before["weight"])


class Reflecting(nn.Conv2d):
    """A convolution with a custom forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 1), mode="reflect"))


@pytest.mark.parametrize("size", [4, 64])
def test_a_prior_keeps_a_custom_forward_and_other_convolutions_refuse_it(size):
    conv = transform(Reflecting(16, 16, 3))
    with torch.no_grad():
        assert conv(torch.randn(1, 16, size, size)).shape[-1] == size
    for make in (bottleneck, separable):
        with pytest.raises(ValueError, match=r"cannot replace Reflecting, which has a forward of its own"):
            make(Reflecting(4, 4, 3))
    network = nn.Sequential(Reflecting(4, 4, 3), nn.Conv2d(4, 4, 3))
    assert swap_convs(network, bottleneck).kept == {"0": "own forward"}


def test_a_weight_that_a_hook_computes_is_kept():
    with pytest.warns(FutureWarning):
        normed = torch.nn.utils.weight_norm(nn.Conv2d(2, 2, 3))
    for make in (basis, bottleneck, transform):
        network = nn.Sequential(normed, nn.Conv2d(2, 2, 3))
        assert swap_convs(network, make).kept == {"0": "weight computed already"}


@pytest.mark.parametrize("make", [bottleneck, separable, se, basis])
def test_a_module_under_two_names_stays_one_module(make):
    conv = nn.Conv2d(4, 4, 3, padding=1)
    network = nn.Sequential(conv, nn.ReLU(), conv)
    swap_convs(network, make)
    assert network[0] is network[2]
    folded = fold_convs(network)
    assert folded[0] is folded[2] and not [
        m for m in folded.modules() if type(m).__module__.startswith("medconv")
    ]


@pytest.mark.parametrize("conv", [basis, smooth])
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nn.LazyConv2d(4, 3), "LazyConv2d has no values in its weight yet"),
        (lambda: nn.Conv2d(4, 4, 3, device="meta"), "Conv2d has no values in its weight yet"),
    ],
)
def test_weights_without_values_are_refused(conv, layer, message):
    with pytest.raises(UnsuitableLayerError, match=message):
        conv(layer())
