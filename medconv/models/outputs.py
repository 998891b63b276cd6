"""Uniform access to network outputs: some networks return more than logits, some only in training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Inside, the network is in evaluation mode; then each of its modules has the mode that it had before."""
    modes_before = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        # one by one: `network.train()` would also wake what a user has frozen
        for module, training in modes_before:
            module.training = training


def full_resolution(output: Tensor | Sequence[Tensor]) -> Tensor:
    """The logits on the input's grid, which come before any deep-supervision outputs.

    Raises:
        ValueError: an output of another type.
    """
    return output if isinstance(output, Tensor) else _tensors(output)[0]


def heads(output: Tensor | Sequence[Tensor], spatial_dims: int) -> list[Tensor]:
    """All logits (batch, classes, *spatial), finest first.

    MONAI's DynUNet stacks its heads along axis 1 in training, (batch, heads, classes, *spatial), and returns
    only the first in evaluation; other networks return lists.

    Raises:
        ValueError: an output of another type.
    """
    if not isinstance(output, Tensor):
        return _tensors(output)
    is_stacked = output.ndim == spatial_dims + 3
    return list(output.unbind(1)) if is_stacked else [output]


def _tensors(output: object) -> list[Tensor]:
    entries = list(output) if isinstance(output, (list, tuple)) else []
    if entries and all(isinstance(entry, Tensor) for entry in entries):
        return entries
    returned = f"a {type(output).__name__}"
    if entries:
        returned += f" of {', '.join(type(entry).__name__ for entry in entries)}"
    raise ValueError(
        "model must return logits, or a list of logits for deep supervision, finest first; "
        f"it returned {returned}"
    )
