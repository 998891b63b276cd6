"""Uniform access to network outputs: some networks return more than logits, some only in training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Inside, the network is in evaluation mode; then each of its modules has the mode that it had before."""
    before = [(part, part.training) for part in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def full_resolution(output: Tensor | Sequence[Tensor]) -> Tensor:
    """The logits on the input's grid, which come before any deep-supervision outputs.

    Raises: ValueError: an output of another type.
    """
    return output if isinstance(output, Tensor) else _tensors(output)[0]


def heads(output: Tensor | Sequence[Tensor], spatial_dims: int) -> list[Tensor]:
    """All logits (batch, classes, *spatial), finest first.

    MONAI's DynUNet stacks its heads along axis 1 in training, (batch, heads, classes, *spatial), and returns
    only the first in evaluation; other networks return lists.
    Raises: ValueError: an output of another type.
    """
    if not isinstance(output, Tensor):
        return _tensors(output)
    return list(output.unbind(1)) if output.ndim == spatial_dims + 3 else [output]


def _tensors(output: object) -> list[Tensor]:
    found = list(output) if isinstance(output, (list, tuple)) else []
    if not found or not all(isinstance(each, Tensor) for each in found):
        inside = f" of {', '.join(type(each).__name__ for each in found)}" if found else ""
        raise ValueError(
            f"model must return logits, or a list of logits for deep supervision, finest first; it returned "
            f"a {type(output).__name__}{inside}"
        )
    return found
