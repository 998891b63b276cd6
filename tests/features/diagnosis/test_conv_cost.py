"""medconv/features/diagnosis/conv_cost.py: operators, memory and limits of layers whose costs are known."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from medconv.convs import transform
from medconv.features.diagnosis import conv_cost
from medconv.features.diagnosis.conv_cost import (
    Counter,
    Layer,
    cost,
    counted,
    kept_bytes,
    limit,
    price,
    remedies,
)


class LayersTime:
    """A clock that layers move, so that no limit depends on the machine: a microsecond from call to call."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        self.seconds += 1e-6
        return self.seconds


CLOCK = LayersTime()


@pytest.fixture
def by_hand(monkeypatch):
    monkeypatch.setattr(conv_cost, "computing_clock", lambda: CLOCK)


class Twice(nn.Conv2d):
    """Computes the convolution twice and keeps a copy of the image. Takes as long as the image is large."""

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.seconds += x.numel()
        return super().forward(x) + super().forward(x * 1.0)


class Fixed(nn.Conv2d):
    """Takes equally long for images of any size."""

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.seconds += 1.0
        return super().forward(x)


class Takes(nn.Conv2d):
    """Takes so many seconds forward."""

    def __init__(self, seconds):
        super().__init__(2, 3, 3)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.seconds += self.seconds
        return super().forward(x)


def layer(custom, size=8):
    convs = [made(2, 3, 3, padding=1) for made in (nn.Conv2d, custom)]
    return Layer("encoder.0", 2, convs[0], convs[1], torch.randn(1, 2, size, size))


def test_operators_and_their_arithmetic_are_counted():
    conv = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    image = torch.randn(1, 2, 8, 8)
    counter = counted(lambda: conv(image.view(1, 2, 8, 8)))
    assert isinstance(counter, Counter) and counter.operators == 1  # views cost nothing
    assert counter.flops == 2 * (3 * 8 * 8) * (2 * 3 * 3)


def test_what_backward_needs_is_counted_without_image_and_weights():
    image = torch.randn(1, 2, 8, 8)
    assert kept_bytes(nn.Conv2d(2, 3, 3), image) == 0
    assert kept_bytes(Twice(2, 3, 3), image) == image.numel() * 4


def test_a_row_has_both_layers():
    row = cost(layer(Twice), pairs=2)
    assert row["case"] == "encoder.0, 2 channels at 8x8, batch 1" and row["count"] == 2
    assert row["operators"][0] < row["operators"][1] and row["kept_bytes"] == [0, 2 * 8 * 8 * 4]
    assert row["seconds"] > 0 and row["ratio"] > 0


@pytest.mark.parametrize(
    ("custom", "ratio", "expected"),
    [(nn.Conv2d, 1.0, "nothing: it costs what nn.Conv costs"), (Fixed, 9.0, "fixed work: ")],
)
@pytest.mark.usefixtures("by_hand")
def test_the_limit_is_measured(custom, ratio, expected):
    assert limit(layer(custom), ratio, pairs=3).startswith(expected)


@pytest.mark.parametrize(("ratio", "expected"), [(2.0, "arithmetic: 2.00"), (9.0, "memory traffic: 2.00")])
@pytest.mark.usefixtures("by_hand")
def test_more_arithmetic_explains_twice_the_time_but_not_nine_times(ratio, expected):
    large = Layer("a", 1, nn.Conv2d(8, 8, 3), Twice(8, 8, 3), torch.randn(2, 8, 160, 160))
    assert limit(large, ratio, pairs=3).startswith(expected)


def test_checkpointing_keeps_nothing_and_prediction_keeps_no_gradients():
    rows = {row["variant"]: row for row in remedies(layer(Twice), pairs=1, compiles=False)}
    assert list(rows) == ["folded, for prediction", "channels-last", "checkpointed"]
    assert rows["checkpointed"]["kept_bytes"] == 0 < rows["checkpointed"]["reference_kept_bytes"]
    assert rows["folded, for prediction"]["kept_bytes"] is None


def test_the_two_ways_of_a_transform_are_timed():
    own = transform(nn.Conv2d(4, 6, 3, padding=1))
    both = Layer("a", 1, nn.Conv2d(4, 6, 3, padding=1), own, torch.randn(1, 4, 8, 8))
    variants = [row["variant"] for row in remedies(both, pairs=1, compiles=False)]
    assert variants[-2:] == ["in one launch", "in two launches"]


@pytest.mark.parametrize("seconds", [0.0, 20.0])
@pytest.mark.usefixtures("by_hand")
def test_the_price_of_a_network_names_the_layer_that_adds_most(seconds):
    plain = layer(nn.Conv2d, size=64)
    dear = replace(layer(Fixed), name="decoder.1")
    result = price([plain, dear, plain], seconds)
    assert result["ratio"] > 1 and result["layer"] == "decoder.1"


@pytest.mark.usefixtures("by_hand")
def test_the_price_counts_each_layer_of_the_network():
    """Three layers that take 1 s more each, and one that takes 2 s more."""
    image = torch.randn(1, 2, 8, 8)
    layers = [Layer("many", 3, Takes(1), Takes(2), image), Layer("one", 1, Takes(1), Takes(3), image)]
    result = price(layers, 0.0)
    assert result["ratio"] == pytest.approx((3 * 2 + 3) / 4, rel=1e-3)
    assert result["layer"] == "many"


@pytest.mark.usefixtures("by_hand")
def test_the_limit_of_a_large_kernel_is_measured():
    wide = Layer("a", 1, nn.Conv2d(2, 3, 7), Fixed(2, 3, 7), torch.randn(1, 2, 16, 16))
    assert limit(wide, 9.0, pairs=1).endswith(
        "on an image of 7x7, for launches and for computing the weight; larger patches and batches hide it"
    )
