"""The layers of a network that `conv=mirror` made equivariant: kernels, vectors and batch norms.

How channels are ordered, and the source: `medconv.convs.mirror`.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medconv.convs.parametrization import CHANNELS_LAST, Foldable, Prior, WeightPrior

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class MirrorPrior(WeightPrior):
    """The kernels of one layer of an equivariant network.

    Rows: first axis of the weight (outputs, or inputs of a transposed convolution); columns: the second.
        both regular:  W[(o,h), (i,g), k] = P[o, (i, gh), flip_h k]     1/copies of the parameters
        rows regular:  W[(o,h), i, k] = P[o, i, flip_h k]               (lifting; depthwise)
        columns regular: W[o, (i,g), k] = P[o, i, flip_g k]             (mapping back)
        neither:       W = mean over h of flip_h P

    Shape:
        original (rows' fields, taps, columns' fields or channels) -> weight (rows, columns, *kernel_size).
    Args:
        axes: spatial axes that are flipped.
        rows: whether rows are regular fields.
        columns: whether columns are regular fields.
    """

    def __init__(self, kernel_size: Sequence[int], axes: Sequence[int], rows: bool, columns: bool) -> None:
        super().__init__(kernel_size)
        self.axes = tuple(axes)
        self.rows = rows
        self.columns = columns

    def _spatial_axis(self, step: int) -> int:
        """The axis of a kernel that is flipped, if `step` group indices already follow the rows' fields."""
        return 1 + self.axes[step] + (step if self.rows else 0)

    def _column_group_axis(self, step: int) -> int:
        """The axis of a step's column index, if both are regular.

        Axes: fields, `step` row indices, spatial axes, column fields, one column index per step.
        """
        return 1 + step + len(self.kernel_size) + 1 + step

    def taps(self, original: Tensor) -> Tensor:
        steps = len(self.axes)
        kernel: Tensor = original.unflatten(1, self.kernel_size)
        if self.rows and self.columns:
            kernel = kernel.unflatten(-1, (-1, *[2] * steps))
        for step in range(steps):
            # The row index h goes after the fields and the earlier axes' h, the column index g to the end.
            spatial_axis = self._spatial_axis(step)
            if self.rows and self.columns:
                flipped = kernel.flip(spatial_axis, self._column_group_axis(step))
                kernel = torch.stack([kernel, flipped], 1 + step)
            elif self.rows:
                kernel = torch.stack([kernel, kernel.flip(spatial_axis)], 1 + step)
            elif self.columns:
                kernel = torch.stack([kernel, kernel.flip(spatial_axis)], -1)
            else:
                kernel = (kernel + kernel.flip(spatial_axis)) / 2
        # The group indices follow their fields, so a reshape makes channels of them.
        row_copies = 2**steps if self.rows else 1
        rows = original.shape[0] * row_copies
        return kernel.reshape(rows, prod(self.kernel_size), -1)

    def nearest(self, taps: Tensor) -> Tensor:
        """The mean over the group, after each copy is flipped back to match the first."""
        steps = len(self.axes)
        kernel: Tensor = taps.unflatten(1, self.kernel_size)
        if self.columns:
            kernel = kernel.unflatten(-1, (-1, *[2] * steps))
        if self.rows:
            kernel = kernel.unflatten(0, (-1, *[2] * steps))
        for step in reversed(range(steps)):  # undoes `taps`
            spatial_axis = self._spatial_axis(step)
            if self.rows:
                first, second = kernel.unbind(1 + step)
                if self.columns:
                    second = second.flip(spatial_axis, self._column_group_axis(step))
                else:
                    second = second.flip(spatial_axis)
                kernel = (first + second) / 2
            elif self.columns:
                first, second = kernel.unbind(-1)
                kernel = (first + second.flip(spatial_axis)) / 2
            else:
                kernel = (kernel + kernel.flip(spatial_axis)) / 2
        return kernel.reshape(kernel.shape[0], prod(self.kernel_size), -1)


class Repeat(Prior):
    """One value per field, repeated for its copies: biases, and the scale and shift of norms.

    Shape:
        original (fields,) -> (fields * copies,).
    """

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, original: Tensor) -> Tensor:
        return original.repeat_interleave(self.copies)

    def right_inverse(self, value: Tensor) -> Tensor:
        value = value.detach().unflatten(0, (-1, self.copies))
        return value.mean(1)


class MirrorBatchNorm(Foldable, fold_is_tested=True):
    """Batch norm in which the copies of a field share parameters and statistics.

    Shape:
        (batch, fields * copies, *spatial) -> the same.
    Args:
        norm: a batch norm of `fields` channels.
        copies: of each field, one per element of the group of flips.
    """

    def __init__(self, norm: _BatchNorm, copies: int) -> None:
        super().__init__()
        self.norm = norm
        self.copies = copies
        self.train(norm.training)

    @classmethod
    def of(cls, norm: _BatchNorm, copies: int) -> "MirrorBatchNorm":
        """From a batch norm of all channels; each field gets the mean over its copies."""
        one_per_field = Repeat(copies).right_inverse
        narrow = _resized(norm, norm.num_features // copies, one_per_field)
        return cls(narrow, copies)

    def forward(self, x: Tensor) -> Tensor:
        layout = torch.contiguous_format
        if not x.is_contiguous():
            layout = CHANNELS_LAST.get(x.ndim, layout)
        # copies side by side along the first spatial axis, so that they count as voxels of one channel
        by_field = x.unflatten(1, (-1, self.copies)).flatten(2, 3)
        normed: Tensor = self.norm(by_field)
        by_copy = normed.unflatten(2, (self.copies, -1))  # (batch, fields, copies, D, ...)
        by_channel: Tensor = by_copy.flatten(1, 2)
        return by_channel.contiguous(memory_format=layout)

    def folded(self) -> nn.Module:
        """A plain batch norm over all channels."""
        num_channels = self.norm.num_features * self.copies
        return _resized(self.norm, num_channels, Repeat(self.copies))


def _resized(norm: _BatchNorm, channels: int, change: Callable[[Tensor], Tensor]) -> _BatchNorm:
    """A plain batch norm like this one with more or fewer channels.

    Args:
        change: maps each vector of its state to one of `channels` values.
    """
    # A subclass may take other arguments and keep other state.
    plain_class = next((cls for cls in _BATCH_NORMS if isinstance(norm, cls)), _BatchNorm)
    new: _BatchNorm = plain_class(channels, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    state = {}
    for key, value in norm.state_dict().items():
        state[key] = change(value) if value.ndim else value  # the count of batches is one number
    if state:
        new.to(next(iter(state.values())))
    new.load_state_dict(state)
    if norm.affine:
        new.requires_grad_(norm.weight.requires_grad)
    return new.train(norm.training)
