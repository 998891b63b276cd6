"""Uniform access to network outputs: some networks return more than logits, some only in training."""

from collections.abc import Sequence

from torch import Tensor


def full_resolution(output: Tensor | Sequence[Tensor]) -> Tensor:
    """The logits on the input's grid, which come before any deep-supervision outputs."""
    return output if isinstance(output, Tensor) else output[0]


def heads(output: Tensor | Sequence[Tensor], spatial_dims: int) -> list[Tensor]:
    """All logits (batch, classes, *spatial), finest first.

    MONAI's DynUNet stacks its heads along axis 1 in training, (batch, heads, classes, *spatial), and returns
    only the first in evaluation; other networks return lists.
    """
    if not isinstance(output, Tensor):
        return list(output)
    return list(output.unbind(1)) if output.ndim == spatial_dims + 3 else [output]
