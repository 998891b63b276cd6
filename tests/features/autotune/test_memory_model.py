"""medconv/planning/topology.py: the estimate against the memory that steps take."""

from functools import partial

import pytest
import torch

from benchmarks.memory import step_memory
from medconv.features.autotune.trial import Choice, Trial, Work
from medconv.models.unet import UNet
from medconv.planning.topology import Budget, Network, encoder_convs, step_bytes
from medconv.training.losses.segmentation import DiceCrossEntropy

FULL, HALF = partial(Choice, "32-true", True, True), partial(Choice, "bf16-mixed", True, True)


RESIDUAL = (1, 2, 3)


@pytest.mark.parametrize(
    ("patch", "channels", "batch", "classes", "choice", "blocks"),
    [
        ((64, 64), (16, 32, 64), 4, 3, Choice(), RESIDUAL),
        ((64, 64), (16, 32, 64), 4, 3, HALF(), RESIDUAL),
        ((24, 32, 16), (16, 32), 3, 9, Choice(), None),
        ((24, 32, 16), (16, 32), 3, 65, Choice(), None),
        # Half precision is slow on a CPU that emulates it
        ((24, 16, 16), (16, 32), 2, 65, HALF(), None),
        ((16, 24, 16), (16, 32), 2, 3, HALF(), None),
        ((16, 24, 16), (16, 32), 2, 3, HALF(activation_checkpointing="pointwise"), None),
        ((32, 32, 32), (16, 32, 64), 2, 3, FULL(activation_checkpointing="blocks"), None),
        ((96, 96), (16, 32, 64, 128), 4, 2, Choice(), None),
    ],
    ids=str,
)
def test_the_estimate_is_near_what_a_step_takes(patch, channels, batch, classes, choice, blocks):
    """Without the weights, their gradients and moments, which `step_memory` finds there already."""
    strides = ((2,) * len(patch),) * (len(channels) - 1)
    kernels = ((3,) * len(patch),) * len(channels)
    torch.manual_seed(0)
    decoder = 2 if blocks is None else 1
    network = UNet(len(patch), 1, classes, channels, strides, convs_per_stage=decoder, residual_blocks=blocks)
    planned = Network(strides, kernels, channels, blocks and encoder_convs(blocks, 3), (decoder,) * 3)
    image, label = torch.randn(batch, 1, *patch), torch.randint(classes, (batch, 1, *patch))
    trial = Trial(
        Work(network, DiceCrossEntropy(), partial(torch.optim.AdamW, lr=1e-3), image, label), choice
    )
    trial.step()
    measured = step_memory(trial.forward, trial.step, torch.device("cpu"))["peak_bytes"]
    budget = Budget(8, precision=choice.precision, activation_checkpointing=choice.activation_checkpointing)
    weights = 16 * sum(p.numel() for p in network.parameters())
    estimate = step_bytes(planned, patch, batch, 1, classes, budget) - weights
    assert estimate == pytest.approx(measured, rel=0.15), f"{estimate / measured - 1:+.3f}"
