"""Network, deep supervision and loss of a training step are one graph for the compiler, without a break."""

from functools import partial

import pytest
import torch

from medconv.convs import basis, smooth, swap_convs
from medconv.models import UNet
from medconv.models.deep_supervision import DeepSupervision
from medconv.targets.label_map import LabelMapTargets
from medconv.training.losses.fit import FittedLoss
from medconv.training.losses.segmentation import DiceCrossEntropy

CONVS = {"basis": basis, "smooth": partial(smooth, throughout=True)}


@pytest.mark.parametrize(("conv", "dims", "supervised"), [("smooth", 2, True), ("basis", 3, False)])
def test_a_step_is_one_graph(conv, dims, supervised):
    """`fullgraph` is an error at a break; loss and gradients are those of the plain step."""
    torch.manual_seed(0)
    network = UNet(dims, 1, 3, (4, 6, 8, 8), (2, 2, 2))
    swap_convs(network, CONVS[conv])
    heads = DeepSupervision(network, 3) if supervised else None
    targets = LabelMapTargets(("a", "b"), ((1,), (2,)))
    loss = FittedLoss(DiceCrossEntropy(), targets, dims)
    image, label = torch.randn(2, 1, *[16] * dims), torch.randint(3, (2, 1, *[16] * dims))

    def step(image, label):
        return loss(heads(network, image) if heads else network(image), label)

    parts = [network, *([heads] if heads else [])]
    parameters = [p for part in parts for p in part.parameters()]
    label = targets.encode(label)
    expected = step(image, label)
    wanted = torch.autograd.grad(expected, parameters, allow_unused=True)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(image, label)
    torch.testing.assert_close(found, expected)
    got = torch.autograd.grad(found, parameters, allow_unused=True)
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    torch.compiler.reset()
