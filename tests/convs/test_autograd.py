"""medconv/convs/autograd.py: an exact hand-written backward, which computes only the gradients that are needed,
in one call.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from reference.backward import HistoricConvolution, TwoCallConvolution
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from medconv.convs import Convolution, convolution
from medconv.convs.autograd import gradients

GEOMETRIES = [
    ((2, 4, 7), (6, 4, 3), {}),
    ((2, 4, 6, 5), (6, 4, 3, 3), {"stride": 2, "padding": 1}),
    ((2, 4, 7, 6), (6, 2, 3, 1), {"padding": (2, 0), "dilation": (2, 1), "groups": 2}),
    ((1, 3, 4, 5, 4), (2, 3, 3, 3, 3), {"stride": (1, 2, 1), "padding": 1}),
]
LIBRARY = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


class Calls(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter()
        self.masks = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._overloadpacket.__name__] += 1
        if func._overloadpacket.__name__ == "convolution_backward":
            self.masks.append(list(args[10]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("image", "weight", "geometry"), GEOMETRIES)
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_equal_torchs(image, weight, geometry, bias):
    inputs = [torch.randn(image), torch.randn(weight), torch.randn(weight[0]) if bias else None]
    leaves = [t.requires_grad_() for t in inputs if t is not None]
    expected, output = LIBRARY[len(image)](*inputs, **geometry), convolution(*inputs, **geometry)
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(output, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_first_and_second_order_gradients_pass_gradcheck():
    x, w, b = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in [(1, 2, 4, 4), (3, 2, 3, 3), (3,)]
    )
    run = lambda x, w, b: convolution(x, w, b, stride=2, padding=1)  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, w, b))
    assert torch.autograd.gradgradcheck(run, (x, w, b))


@pytest.mark.parametrize(
    "needed", [(True, True, True), (False, True, True), (True, False, False), (False, False, True)]
)
def test_one_call_for_exactly_the_gradients_that_are_needed(needed):
    inputs = [
        torch.randn(s, requires_grad=n)
        for s, n in zip([(1, 2, 4, 4), (3, 2, 3, 3), (3,)], needed, strict=True)
    ]
    output = convolution(*inputs)
    with Calls() as calls:
        output.sum().backward()
    assert calls.count["convolution_backward"] == 1 and calls.count["convolution"] == 0
    assert calls.masks == [list(needed)]
    assert [t.grad is not None for t in inputs] == list(needed)


@pytest.mark.parametrize(
    ("function", "backward", "forward"), [(TwoCallConvolution, 2, 0), (HistoricConvolution, 0, 7)]
)
def test_the_older_backwards_are_exact_and_need_more_calls(function, backward, forward):
    """Batch 3: the historic weight gradient is one grouped convolution, the rest of the calls are
    reshapes.
    """
    x, w = torch.randn(3, 2, 6, 6, requires_grad=True), torch.randn(4, 2, 3, 3, requires_grad=True)
    expected = torch.autograd.grad(F.conv2d(x, w, stride=2, padding=1).square().sum(), [x, w])
    output = convolution(x, w, stride=2, padding=1, function=function)
    loss = output.square().sum()
    with Calls() as calls:
        gradients = torch.autograd.grad(loss, [x, w])
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert calls.count["convolution_backward"] == backward
    assert calls.count["convolution"] <= forward


def test_a_subclass_can_replace_the_backward():
    class Halved(Convolution):
        """The weight learns at half the rate."""

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
            x, weight, bias = gradients(ctx, grad)
            return x, None if weight is None else weight / 2, bias, None, None, None, None

    x, w = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(convolution(x, w).square().sum(), w)
    (halved,) = torch.autograd.grad(convolution(x, w, function=Halved).square().sum(), w)
    torch.testing.assert_close(halved, expected / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_dtypes_of_torch(dtype):
    x, w, b = (
        torch.randn(2, 4, 6, 6),
        torch.randn(6, 4, 3, 3, requires_grad=True),
        torch.randn(6, requires_grad=True),
    )
    with torch.autocast("cpu", dtype):
        output, expected = convolution(x, w, b, padding=1), F.conv2d(x, w, b, padding=1)
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected)
    output.float().sum().backward()
    assert w.grad.dtype == torch.float32


def test_double_precision_stays_double_inside_autocast():
    x, w = torch.randn(1, 2, 4, 4, dtype=torch.float64), torch.randn(3, 2, 3, 3, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert convolution(x, w).dtype == F.conv2d(x, w).dtype == torch.float64


def test_compiles_as_one_graph():
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3, requires_grad=True)
    run = torch.compile(lambda x, w: convolution(x, w, padding=1), fullgraph=True, backend="aot_eager")
    (a,), (b,) = (
        torch.autograd.grad(f(x, w).square().sum(), [w])
        for f in (run, lambda x, w: F.conv2d(x, w, padding=1))
    )
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"weight": torch.ones(2, 2, 3)},
            r"x and weight must have equally many axes, 3 or more, got 4 and 3",
        ),
        (
            {"weight": torch.ones(2, 2, 3, 3), "stride": (1, 1, 1)},
            r"stride must be one number or 2.*\(1, 1, 1\)",
        ),
    ],
)
def test_errors_name_the_argument_and_its_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        convolution(torch.ones(1, 2, 4, 4), **arguments)
