"""Folding: plain classes after folding, and layers that fold to something else than themselves.

test_swap.py folds whole networks.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from medconv.convs import fold_convs, smooth, transform
from medconv.convs.parametrization import Foldable, check_folds, classes_that_stay
from medconv.convs.squeeze_excitation import SqueezeExcitation


class Halved(nn.Module):
    def forward(self, bias: torch.Tensor) -> torch.Tensor:
        return bias / 2


def test_a_folded_layer_is_plain_beside_a_parametrization_of_another_package():
    """`transform` overrides `forward`, which must go with its prior while the bias stays computed."""
    conv = transform(nn.Conv2d(2, 3, 3))
    parametrize.register_parametrization(conv, "bias", Halved())
    image = torch.randn(1, 2, 6, 7)
    expected = conv(image)
    folded = fold_convs(conv)
    assert parametrize.type_before_parametrizations(folded) is nn.Conv2d
    assert not parametrize.is_parametrized(folded, "weight") and parametrize.is_parametrized(folded, "bias")
    torch.testing.assert_close(folded(image), expected)
    torch.testing.assert_close(conv(image), expected)  # it keeps its class


class Doubled(Foldable):
    """Twice a convolution, or by `factor` in what it folds to."""

    def __init__(self, conv: nn.Module, factor: float = 2) -> None:
        super().__init__()
        self.conv, self.factor = conv, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.conv(x)

    def folded(self) -> nn.Module:
        with torch.no_grad():
            self.conv.weight.mul_(self.factor)
        return self.conv


class Gated(Foldable):
    """A convolution and a Foldable gate, which it folds to in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(2, 2, 1), Doubled(nn.Conv2d(2, 2, 1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.conv(x))

    def folded(self) -> nn.Module:
        return nn.Sequential(self.conv, self.gate)


@pytest.mark.parametrize("network", [Gated(), nn.Sequential(Gated())], ids=["root", "inside"])
def test_a_foldable_inside_another_is_folded_first(network):
    image = torch.randn(1, 2, 3, 3)
    folded = fold_convs(network)
    torch.testing.assert_close(folded(image), network(image))
    assert not any(isinstance(module, Foldable) for module in folded.modules())
    names = [name for name, _ in network.named_modules()]
    assert classes_that_stay(network, names) == set()  # some are gone with what was around them


def test_what_a_layer_folds_to_is_compared_with_it():
    convs = [nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.Conv2d(3, 2, 3, padding=1, bias=False)]
    image = torch.randn(1, 1, 6, 7)
    right = nn.Sequential(*map(Doubled, convs))
    before = right(image)
    check_folds(right, image)
    assert torch.equal(right(image), before)
    with pytest.raises(
        ValueError, match=r"layer 1: what folded\(\) of Doubled returns differs from the layer by 0.5 of"
    ):
        check_folds(nn.Sequential(convs[0], Doubled(convs[1], 1)), image)


@pytest.mark.parametrize("module", ["mine.doubled", "medconv.convs.doubled"])
def test_a_wrong_fold_is_named_wherever_its_class_is_written(monkeypatch, module):
    monkeypatch.setattr(Doubled, "__module__", module)
    conv = nn.Conv2d(1, 2, 3, padding=1)
    with pytest.raises(ValueError, match=r"layer 0: what folded\(\) of Doubled returns differs"):
        check_folds(nn.Sequential(Doubled(conv, 1)), torch.randn(1, 1, 6, 7))


class Doubtful(SqueezeExcitation):
    """Its base class has a tested fold, which this one does not inherit."""

    def folded(self) -> nn.Module:
        return nn.Identity()


def test_a_subclass_of_a_layer_with_a_tested_fold_is_checked():
    image = torch.randn(1, 4, 6, 7)
    check_folds(nn.Sequential(SqueezeExcitation(2, 4, 2)), image)
    with pytest.raises(ValueError, match=r"layer 0: what folded\(\) of Doubtful returns differs"):
        check_folds(nn.Sequential(Doubtful(2, 4, 2)), image)


class Kept(Foldable):
    """Folds to itself, takes a keyword and changes its input."""

    def forward(self, x: torch.Tensor, scale: float = 1) -> torch.Tensor:
        return x.mul_(scale)

    def folded(self) -> nn.Module:
        return self


class Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Kept()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.clone(), scale=3)


def test_right_layers_of_any_form_pass():
    check_folds(Calling(), torch.randn(1, 1, 4, 4))


class Gate(nn.Conv2d):
    """A convolution of a user's that inherits from torch's and is no `Foldable`."""


def test_classes_that_fold_to_themselves_are_named():
    prior = smooth(nn.Conv2d(2, 2, 3), throughout=True)
    network = nn.Sequential(nn.Sequential(Gate(1, 2, 3), nn.ReLU()), prior, SqueezeExcitation(2, 2, 2))
    assert classes_that_stay(network, ["0", "1", "2"]) == {Gate}
    assert classes_that_stay(network, ["1", "2"]) == set()
