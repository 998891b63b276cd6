"""One shape for what networks return: some return more than logits, some only while training."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def full_resolution(output: Tensor | Sequence[Tensor]) -> Tensor:
    """The logits on the input's grid; deep-supervision heads, if the network has some, come after them."""
    return output if isinstance(output, Tensor) else output[0]


def heads(output: Tensor | Sequence[Tensor], spatial_dims: int) -> list[Tensor]:
    """All logits (batch, classes, *spatial), finest first.

    MONAI's DynUNet stacks its heads along axis 1 while training, (batch, heads, classes, *spatial), and
    returns the first alone in evaluation; others return lists.
    """
    if not isinstance(output, Tensor):
        return list(output)
    return list(output.unbind(1)) if output.ndim == spatial_dims + 3 else [output]
