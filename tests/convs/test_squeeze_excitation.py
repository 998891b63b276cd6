"""medconv/convs/squeeze_excitation.py: gates from the means of all channels."""

from copy import deepcopy

import numpy as np
import torch
from helpers.conv_family import build, image
from torch import nn

from medconv.convs import basis, fold_convs, se


def test_se_wraps_any_convolution():
    plain, x = nn.Conv3d(4, 8, 3), image(3)
    module = se(plain, reduction=4, inner=basis)
    assert module[0] is plain and hasattr(plain, "parametrizations")
    folded = fold_convs(module)
    assert type(folded[0]) is nn.Conv3d
    torch.testing.assert_close(folded(x), module(x), rtol=1e-5, atol=1e-5)


def test_the_convolution_inside_projects_the_present_weight_if_asked():
    plain = nn.Conv3d(4, 8, 3)
    same = deepcopy(plain)
    module = se(plain, inner=basis, init_from_weights=True)
    expected = basis(same, init_from_weights=True)
    torch.testing.assert_close(module[0].weight, expected.weight)
    kept = nn.Conv3d(4, 8, 3)
    assert se(kept, init_from_weights=True)[0] is kept


def test_se_scales_each_channel_by_a_gate_from_all_channel_means():
    module = build("se", 2)
    x = image(2)
    features = module[0](x).detach().double().numpy()
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in module[1].parameters())
    for sample, output in zip(features, module(x).detach().numpy(), strict=True):
        hidden = np.maximum(w1[:, :, 0, 0] @ sample.mean((1, 2)) + b1, 0)
        gate = 1 / (1 + np.exp(-(w2[:, :, 0, 0] @ hidden + b2)))
        np.testing.assert_allclose(output, sample * gate[:, None, None], rtol=1e-4, atol=1e-6)
