"""medconv/convs/acs.py: each third of the outputs has the taps of one plane."""

import numpy as np
import pytest
import torch
from torch import nn

from medconv.convs import acs, load_plane_weight


def coefficients(conv):
    """(out, in, coefficients), float64."""
    return conv.parametrizations.weight.original.detach().double().numpy().transpose(0, 2, 1)


def test_acs_gives_each_third_of_the_outputs_one_plane():
    conv = acs(nn.Conv3d(2, 7, 3, padding=1))
    learned = coefficients(conv).reshape(7, 2, 3, 3)
    weight = conv.weight.detach().numpy()
    for o in range(7):
        plane = [(slice(None), slice(None), 1), (slice(None), 1), (1,)][o * 3 // 7]
        expected = np.zeros((2, 3, 3, 3))
        for i in range(2):
            expected[i][plane] = learned[o, i]
        np.testing.assert_allclose(weight[o], expected, atol=1e-7)


def test_acs_accepts_trained_2d_weights():
    flat = nn.Conv2d(3, 6, 3, padding=1)
    conv = acs(nn.Conv3d(3, 6, 3, padding=1), weight_2d=flat.weight)
    with torch.no_grad():
        conv.bias.copy_(flat.bias)
    image = torch.randn(1, 3, 8, 9)
    volume = image[..., None].expand(-1, -1, -1, -1, 5)
    torch.testing.assert_close(
        conv(volume)[:, :2, :, :, 2], flat(image)[:, :2], rtol=1e-4, atol=1e-5
    )  # axial outputs
    with pytest.raises(ValueError, match=r"weight_2d must have shape .*\(6, 3, 3, 3\), got \(6, 3, 5, 5\)"):
        load_plane_weight(conv, torch.zeros(6, 3, 5, 5))
