"""medconv/planning/topology.py: where stages halve, their kernels, the number of weights; values of the config
that fit no network; every plan can be built.
"""

import itertools
from math import prod

import numpy as np
import pytest
import torch
from helpers.plans import NNUNET, single_case
from torch import nn

from medconv.models.unet import UNet
from medconv.planning.limits import PlanOverrides
from medconv.planning.planner import plan
from medconv.planning.topology import Budget, Network, encoder_convs, need_convs, num_weights, stem_for

THIN_MM, THICK_MM = 0.62, 3.6
SHAPES = [
    *((36, 50, 35), (7, 9, 100), (320, 320, 11), (4, 4, 4), (15, 16, 17), (600, 20, 5)),
    *((64, 64), (700, 500), (5, 9)),
]
SPACINGS = [(1.0, 1.0, 1.0), (0.5, 0.5, 7.5), (3.0, 0.4, 1.0)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("gb", [1.5, 10])
def test_every_plan_can_be_built(shape, spacing, gb):
    axes = len(shape)
    planned = plan(single_case(shape, spacing[:axes]), budget=Budget(gb))
    steps = np.array(planned.strides, int).reshape(-1, axes)
    divisor = steps.prod(axis=0)
    assert len(planned.channels) == len(planned.kernel_sizes) == len(steps) + 1
    assert all(p % d == 0 and p / d >= 4 for p, d in zip(planned.patch_size, divisor, strict=True))
    assert set(steps.ravel()) <= {1, 2} and (steps.max(axis=1, initial=2) == 2).all()
    assert all(k in (1, 3) for kernel in planned.kernel_sizes for k in kernel)
    assert all(3 in kernel for kernel in planned.kernel_sizes)
    assert all(
        type(v) is int for v in (*planned.patch_size, *planned.channels, *itertools.chain(*planned.strides))
    )
    with torch.device("meta"):
        network = UNet(axes, 1, 2, planned.channels, planned.strides, planned.kernel_sizes)
        assert (
            network(torch.zeros(planned.batch_size, 1, *planned.patch_size)).shape[2:] == planned.patch_size
        )


@pytest.mark.parametrize("thick", range(3))
def test_thick_slices_are_halved_once_voxels_are_about_cubes(thick):
    """20 slices of 3.6 mm, voxels of 0.62 mm: the first two steps halve the plane alone."""

    def at(across, within):
        return tuple(across if axis == thick else within for axis in range(3))

    planned = plan(single_case(at(20, 320), at(THICK_MM, THIN_MM)), budget=Budget(24))
    assert planned.spacing_mm == at(THICK_MM, THIN_MM) and planned.patch_size == at(20, 320)
    assert planned.strides == (at(1, 2), at(1, 2), at(2, 2), at(1, 2), at(1, 2), at(1, 2))
    assert planned.kernel_sizes == (at(1, 3), at(1, 3), *(at(3, 3),) * 5)


def test_kernels_stay_3_once_they_are_and_are_3_in_the_last_stage():
    flat = plan(single_case((256, 256, 8), (1, 1, 1)), budget=NNUNET)
    assert [step[2] for step in flat.strides] == [2, 1, 1, 1, 1, 1] and flat.kernel_sizes == ((3, 3, 3),) * 7
    thick = plan(single_case((32, 32, 8), (1, 1, 20)))
    assert thick.kernel_sizes == ((3, 3, 1),) * 3 + ((3, 3, 3),)


def test_a_patch_of_the_config_is_halved_where_it_is_even():
    planned = plan(single_case((36, 50, 35), (1, 1, 1)), PlanOverrides(patch_size=[45, 60, 16]))
    assert planned.patch_size == (45, 60, 16) and planned.strides == ((1, 2, 2), (1, 2, 2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"strides": [[2, 2]]},
            r"strides needs 3 whole numbers of 1 or more for each step.*got \[\[2, 2\]\]",
        ),
        ({"strides": [0]}, r"strides needs 3 whole numbers"),
        ({"strides": "fast"}, r"strides needs 3 whole numbers.*got fast"),
        ({"strides": [[2, 2, 1.5]]}, r"strides needs 3 whole numbers"),
        ({"kernel_sizes": [3, 3, 3, [3, 3, 2]]}, r"kernel_sizes needs 3 odd numbers for each of 4 stages"),
        ({"kernel_sizes": [3, 3, 3, 3, 3]}, r"kernel_sizes needs 3 odd numbers for each of 4 stages"),
        ({"kernel_sizes": 3}, r"kernel_sizes needs 3 odd numbers for each of 4 stages, got 3"),
        ({"channels": [8] * 9}, r"channels needs one number of 1 or more for each of 4 stages, got \[8, 8"),
        ({"channels": [8, 0]}, r"channels needs one number of 1 or more for each of 2 stages"),
        ({"convs_per_stage": [2, 0]}, r"convs_per_stage needs one number of 1 or more for each of 2 stages"),
        ({"convs_per_stage": 0}, r"convs_per_stage needs 1 or more, got 0"),
    ],
)
def test_values_that_fit_no_network_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        plan(single_case((36, 50, 35), (1, 1, 1)), PlanOverrides(**values))


@pytest.mark.parametrize(
    ("blocks", "convs_per_stage"),
    [(None, 2), (None, 4), (None, (1, 3, 2)), ((1, 2, 4, 9), 1), ((1, 2, 4), (2, 1, 3))],
)
def test_num_weights_counts_the_kernels_of_the_unet(blocks, convs_per_stage):
    strides, kernels, channels = ((2, 2, 1), (2, 2, 2)), ((3, 3, 1), (3, 3, 3), (3, 3, 3)), (8, 12, 16)
    with torch.device("meta"):
        network = UNet(3, 2, 5, channels, strides, kernels, convs_per_stage, residual_blocks=blocks)
    sizes = [
        prod(m.weight.shape) for m in network.modules() if isinstance(m, (nn.Conv3d, nn.ConvTranspose3d))
    ]
    decoder = need_convs(convs_per_stage, 3)
    encoder = decoder if blocks is None else encoder_convs(blocks, 3)
    assert num_weights(Network(strides, kernels, channels, encoder, decoder), 2, 5) == sum(sizes)


@pytest.mark.parametrize(
    ("size", "stem"),
    [
        ((28, 28), (3, 1, True)),
        ((64, 64), (3, 1, True)),
        ((96, 96), (3, 1, False)),
        ((224, 224), (7, 2, False)),
        ((28, 28, 28), (3, 1, False)),
        ((16, 16, 16), (3, 1, True)),
        ((96, 96, 64), (7, 2, False)),
    ],
)
def test_the_stem_depends_on_the_image_size(size, stem):
    assert tuple(stem_for(size).values()) == stem
