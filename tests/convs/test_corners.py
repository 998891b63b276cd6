"""Layers and networks that are not as usual: shared, frozen, subclassed, zero, stacked; each was broken
once.
"""

import io
from copy import deepcopy

import pytest
import torch
from helpers.conv_family import LAYERS, build, dims_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from medconv.convs import (
    Mirror,
    basis,
    bottleneck,
    convolution,
    fold_convs,
    folding,
    masked,
    se,
    separable,
    spacing,
    swap_convs,
    transform,
)


class Reflecting(nn.Conv2d):
    """A convolution with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 1), mode="reflect"))


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_folding_parts_of_one_weight() -> None:
    wide, image = nn.Parameter(torch.randn(4, 6, 3, 3)), torch.randn(1, 4, 8, 8)
    rows, columns = [[0, 0, 0], [1, 1, 1], [0, 0, 0]], [[0, 1, 0]] * 3
    parts = [masked(nn.Conv2d(4, 4, 3, padding=1), weight=wide, mask=mask) for mask in (rows, columns)]
    network = nn.Sequential(*parts)
    folded = fold_convs(network)
    torch.testing.assert_close(folded(image), network(image), rtol=1e-4, atol=1e-4)
    assert folded[0].weight is not folded[1].weight


@pytest.mark.parametrize("size", [4, 64])
def test_a_forward_of_ones_own_is_kept(size: int) -> None:
    conv = transform(Reflecting(16, 16, 3))
    with torch.no_grad():
        assert conv(torch.randn(1, 16, size, size)).shape[-1] == size
    for make in (bottleneck, separable):
        with pytest.raises(ValueError, match=r"cannot replace Reflecting, which has a forward of its own"):
            make(Reflecting(4, 4, 3))
    report_network = nn.Sequential(Reflecting(4, 4, 3), nn.Conv2d(4, 4, 3))
    assert swap_convs(report_network, bottleneck).kept == {"0": "own forward"}


def test_a_parametrization_after_ours_counts_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, image = transform(nn.Conv2d(8, 8, 3, padding=1)), torch.randn(1, 8, 6, 6)
    parametrize.register_parametrization(conv, "weight", Double())
    monkeypatch.setattr(folding, "prefers_two_launches", lambda *_: True)
    torch.testing.assert_close(conv(image), F.conv2d(image, conv.weight, conv.bias, padding=1))


@pytest.mark.parametrize("name", [*LAYERS, "mirror"])
def test_training_flags_dtype_and_frozen_weights_stay(name: str) -> None:
    dims = dims_of(name)[0] if name != "mirror" else 2
    conv, norm = (nn.Conv3d, nn.BatchNorm3d) if dims == 3 else (nn.Conv2d, nn.BatchNorm2d)
    network = (
        nn.Sequential(conv(1, 4, 3, padding=1), norm(4), nn.ReLU(), conv(4, 2, 3, padding=1)).double().eval()
    )
    network.requires_grad_(False)
    image = torch.randn(2, 1, *[6] * dims, dtype=torch.float64)
    if name == "mirror":
        swap_convs(network, Mirror((0,)), example=image)
    else:
        swap_convs(
            network,
            LAYERS[name],
            **({"spacing_mm": (1.0,) * dims, "example": image} if name == "spacing" else {}),
        )
    folded = fold_convs(network)
    for module in (*network.modules(), *folded.modules()):
        assert not module.training
    frozen = [p.requires_grad for n, p in (*network.named_parameters(), *folded.named_parameters())]
    assert name == "se" or not any(frozen)
    assert all(p.dtype == torch.float64 for p in network.parameters())
    torch.testing.assert_close(folded(image), network(image))


def test_layers_that_share_a_weight_are_kept() -> None:
    a, b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    b.weight = a.weight
    network = nn.Sequential(a, b, nn.Conv2d(4, 4, 3, padding=1))
    report = swap_convs(network, basis)
    assert report.swapped == ["2"] and report.kept == {"0": "sharing its weight", "1": "sharing its weight"}
    assert network[0].weight is network[1].weight
    network(torch.randn(1, 4, 5, 5))


@pytest.mark.parametrize("make", [bottleneck, separable, se, basis])
def test_one_module_under_two_names_stays_one(make) -> None:
    conv = nn.Conv2d(4, 4, 3, padding=1)
    network = nn.Sequential(conv, nn.ReLU(), conv)
    swap_convs(network, make)
    assert network[0] is network[2]
    folded = fold_convs(network)
    assert folded[0] is folded[2] and not [
        m for m in folded.modules() if type(m).__module__.startswith("medconv")
    ]


def test_a_shared_batch_norm_becomes_one_of_fields() -> None:
    norm = nn.BatchNorm2d(4)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), norm, nn.Conv2d(4, 4, 3, padding=1), norm, nn.Conv2d(4, 1, 1)
    )
    swap_convs(network, Mirror((0,)), example=torch.randn(2, 1, 8, 8))
    assert network[1] is network[3]


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "acs"])
def test_a_folded_network_can_be_saved_and_traced(name: str) -> None:
    folded, image = fold_convs(nn.Sequential(build(name))), torch.randn(1, 4, 5, 5)
    buffer = io.BytesIO()
    torch.save(folded, buffer)
    buffer.seek(0)
    torch.testing.assert_close(
        torch.load(buffer, weights_only=False)(image), folded(image)
    )  # written three lines above
    torch.testing.assert_close(torch.jit.trace(folded, image)(image), folded(image))


@pytest.mark.parametrize("make", [bottleneck, separable, basis])
def test_layers_that_start_at_zero_still_learn(make) -> None:
    conv = nn.Conv2d(4, 4, 3, padding=1)
    nn.init.zeros_(conv.weight)
    module = make(conv)
    output = module(torch.randn(1, 4, 5, 5))
    assert (
        float((output - output.mean((0, 2, 3), keepdim=True)).detach().abs().max()) < 1e-6
    )  # nothing but the bias
    output.sum().backward()
    assert any(float(p.grad.abs().max()) > 0 for p in module.parameters() if p.ndim > 1)


def test_weights_computed_by_others_are_kept() -> None:
    with pytest.warns(FutureWarning):
        old = torch.nn.utils.weight_norm(nn.Conv2d(2, 2, 3))
    for make in (basis, bottleneck, transform):
        network = nn.Sequential(deepcopy_free(old), nn.Conv2d(2, 2, 3))
        assert swap_convs(network, make).kept == {"0": "weight computed already"}


def deepcopy_free(layer: nn.Module) -> nn.Module:
    """The same layer: one whose weight is computed by a hook cannot be copied."""
    return layer


@pytest.mark.parametrize(
    "refused",
    [
        lambda conv: transform(conv, bank=torch.zeros(4, 4, 3, 3)),
        lambda conv: masked(conv, mask=torch.zeros(3, 3)),
        lambda conv: basis(conv, bank=torch.zeros(1, 3, 3)),
        lambda conv: spacing(conv),
    ],
)
def test_a_refused_layer_is_as_it_was(refused) -> None:
    conv = nn.Conv2d(4, 4, 3)
    before = deepcopy(conv.state_dict())
    with pytest.raises(ValueError, match="every weight zero|spacing_mm is needed"):
        refused(conv)
    assert type(conv) is nn.Conv2d and conv.state_dict().keys() == before.keys()
    assert torch.equal(conv.weight, before["weight"])


def test_a_pattern_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"where must be a regular expression, got '\('"):
        swap_convs(nn.Sequential(nn.Conv2d(1, 1, 3)), basis, "(")


def test_double_precision_stays_double_inside_autocast() -> None:
    x, w = torch.randn(1, 2, 4, 4, dtype=torch.float64), torch.randn(3, 2, 3, 3, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert convolution(x, w).dtype == F.conv2d(x, w).dtype == torch.float64


def test_arguments_in_mm_grow_with_the_layers_voxels() -> None:
    conv = lambda: nn.Conv2d(2, 2, 3, padding=1)  # noqa: E731
    deep, fine = {"spacing_mm": (4.0, 4.0), "scale": 4.0}, {"spacing_mm": (1.0, 1.0)}
    for make, key in ((transform, "sigma_mm"), (basis, "sigma_mm")):
        a, b = (
            make(conv(), **{key: 1.3}, **grid).parametrizations.weight[0].state_dict()
            for grid in (deep, fine)
        )
        assert all(torch.allclose(a[k], b[k]) for k in a)
    for make, key in ((LAYERS["ball"], "radius_mm"), (spacing, "reference_mm")):
        shapes = {
            tuple(make(conv(), **{key: 2.0}, **grid).parametrizations.weight[0].mixtures.shape)
            for grid in (deep, fine)
        }
        assert len(shapes) == 1
