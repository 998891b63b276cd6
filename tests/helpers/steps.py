"""One training step of a network, and whether another network makes the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medconv.models.outputs import heads


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
    (loss, grads), (expected, expected_grads) = one_step(network, image), one_step(plain, image)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-4, atol=1e-5, msg=name)
