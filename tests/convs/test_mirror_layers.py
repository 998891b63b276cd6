"""medconv/convs/mirror_layers.py: kernels by their definition, and statistics that copies share."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from medconv.convs.mirror_layers import MirrorBatchNorm, MirrorPrior


@pytest.mark.parametrize("axes", [(0,), (1, 2), (2, 0, 1)])
@pytest.mark.parametrize(("rows", "columns"), [(True, True), (True, False), (False, True), (False, False)])
def test_kernels_follow_the_definition(axes: tuple[int, ...], rows: bool, columns: bool) -> None:
    size, copies = (3, 1, 3), 2 ** len(axes)
    prior = MirrorPrior(size, axes, rows, columns)
    own = torch.randn(2, 9, 3 * (copies if rows and columns else 1))
    weight, kernel = prior(own).numpy(), own.numpy().reshape(2, *size, -1)
    elements = list(product((0, 1), repeat=len(axes)))

    def flipped(values: np.ndarray, element: tuple[int, ...]) -> np.ndarray:
        return np.flip(values, [a for a, on in zip(axes, element, strict=True) if on])

    for o, i in product(range(2), range(3)):
        for (h, eh), (g, eg) in product(enumerate(elements), enumerate(elements)):
            if rows and columns:
                between = elements.index(tuple(a ^ b for a, b in zip(eh, eg, strict=True)))
                expected = flipped(kernel[o, ..., i * copies + between], eh)
                kernel_made = weight[o * copies + h, i * copies + g]
            elif rows:
                expected, kernel_made = flipped(kernel[o, ..., i], eh), weight[o * copies + h, i]
            elif columns:
                expected, kernel_made = flipped(kernel[o, ..., i], eg), weight[o, i * copies + g]
            else:
                expected = np.mean([flipped(kernel[o, ..., i], e) for e in elements], 0)
                kernel_made = weight[o, i]
            np.testing.assert_allclose(kernel_made, expected, atol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(True, True), (True, False), (False, True), (False, False)])
def test_right_inverse_recovers_the_kernels(rows: bool, columns: bool) -> None:
    prior = MirrorPrior((3, 3), (0, 1), rows, columns)
    weight = prior(torch.randn(2, 9, 3 * (4 if rows and columns else 1)))
    torch.testing.assert_close(prior(prior.right_inverse(weight)), weight)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_batch_norm_shares_statistics_among_copies(layout: torch.memory_format) -> None:
    norm, plain = MirrorBatchNorm(nn.BatchNorm3d(3), 2), nn.BatchNorm3d(3)
    x = torch.randn(2, 6, 4, 4, 4).contiguous(memory_format=layout)
    expected = plain(torch.cat([x[:, ::2], x[:, 1::2]], 2))  # copies side by side in space
    output = norm(x)
    assert output.is_contiguous(memory_format=layout)
    torch.testing.assert_close(output[:, ::2], expected[:, :, :4], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output[:, 1::2], expected[:, :, 4:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.norm.running_var, plain.running_var)
