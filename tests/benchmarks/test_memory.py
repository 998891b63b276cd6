"""scripts/benchmarks/memory.py: live and saved tensors, counted to the byte."""

import torch
from torch import nn

from benchmarks.memory import LiveTensors, step_memory


def test_live_tensors_are_counted_to_the_byte():
    weight = torch.ones(100, requires_grad=True)
    with LiveTensors() as live:
        kept = weight * 2  # 400 bytes
        view = kept[:50]
        gone = torch.zeros(1000)
        del gone
    assert live.bytes_alive() == 400
    assert live.peak_bytes == 4400
    del kept
    assert live.bytes_alive() == 400
    del view
    assert live.bytes_alive() == 0


def test_saved_bytes_are_what_a_backward_pass_needs():
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(16, 8)
    forward = lambda: layer(x).relu().sum()  # noqa: E731
    memory = step_memory(forward, lambda: forward().backward(), x.device)
    assert memory["saved_bytes"] == 16 * 8 * 4 + 4  # the result of the relu, and the loss
    assert memory["peak_bytes"] > memory["saved_bytes"]
