"""medconv/convs/swap.py: networks of ours and of MONAI, with their convolutions swapped and folded
(`fold_convs` of single layers: test_fold.py).
"""

import re
from collections import Counter
from copy import deepcopy
from functools import partial

import pytest
import torch
from helpers.conv_family import IN_MM, LAYERS, UNGROUPED
from monai.networks import nets
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from medconv.convs import SwapReport, ball, basis, fold_convs, plain, spacing, swap_convs, transform
from medconv.models.unet import UNet

DOWN, UP, POINT = "down-sampling by its kernel", "transposed", "1x1"
NETWORKS = {
    "unet 3d": lambda: UNet(3, 1, 2, (4, 6, 8), (2, (1, 2, 2))),
    "unet 2d": lambda: UNet(2, 1, 2, (4, 8), (2,), kernel_size=(5, 3)),
}
# 3D, 32 voxels: number of spatial convolutions, and of those that stay.
MONAI = {
    "unet": (lambda: nets.UNet(3, 1, 2, (4, 8, 8), (2, 2), num_res_units=2), 10, {UP: 2}),
    "dynunet": (
        lambda: nets.DynUNet(3, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 6, 8]),
        10,
        {POINT: 1, UP: 2},
    ),
    "segresnet": (lambda: nets.SegResNet(3, 8, blocks_down=(1, 1), blocks_up=(1,)), 8, {POINT: 2}),
    "basicunet": (lambda: nets.BasicUNet(3, 1, 2, features=(4, 4, 8, 8, 8, 4)), 18, {UP: 4, POINT: 1}),
    "resnet": (lambda: nets.resnet10(spatial_dims=3, n_input_channels=1, num_classes=2), 9, {POINT: 3}),
    "densenet": (
        lambda: nets.DenseNet(3, 1, 2, init_features=8, growth_rate=4, block_config=(2, 2)),
        5,
        {POINT: 5},
    ),
    "mednext": (lambda: nets.MedNeXt(3, 8, 1, 2), 22, {POINT: 53, UP: 5}),
}


def convolutions(network):
    kinds = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return [layer for layer in network.modules() if isinstance(layer, kinds)]


def image_for(network):
    two = any(isinstance(layer, nn.Conv2d) for layer in network.modules())
    return torch.randn(2, 1, *[8] * (2 if two else 3))


@pytest.mark.parametrize("name", NETWORKS)
def test_fold_leaves_a_plain_network_of_equal_output(name):
    torch.manual_seed(0)
    network = NETWORKS[name]()
    bare = deepcopy(network)
    image = image_for(network)
    swap_convs(network, transform)
    network(image)  # changes the running statistics
    network.eval()
    before, state = network(image).detach(), deepcopy(network.state_dict())

    folded = fold_convs(network)
    torch.testing.assert_close(folded(image), before, rtol=1e-5, atol=1e-5)
    assert not any(hasattr(layer, "parametrizations") for layer in folded.modules())
    assert not any("medconv.convs" in type(layer).__module__ for layer in folded.modules())
    assert {type(layer) for layer in convolutions(folded)} == {type(layer) for layer in convolutions(bare)}
    assert sorted(folded.state_dict()) == sorted(bare.state_dict())
    bare.load_state_dict(folded.state_dict())
    torch.testing.assert_close(bare.eval()(image), before, rtol=1e-5, atol=1e-5)

    with torch.no_grad():  # the copy shares nothing
        for parameter in folded.parameters():
            parameter.zero_()
    assert network.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    output = network(image)
    assert torch.equal(output, before)
    output.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_where_selects_by_name():
    network = UNet(2, 1, 2, (4, 8), (2,))
    report = swap_convs(network, transform, where=r"^encoder\.1")
    assert report.swapped == ["encoder.1.0", "encoder.1.3"]
    assert report.kept["encoder.0.0"] == r"not matched by '^encoder\\.1'"
    assert report.kept["down.0"] == DOWN  # not because of `where`
    assert not parametrize.is_parametrized(network.get_submodule("encoder.0.0"))


def test_report_is_one_line():
    report = swap_convs(UNet(2, 1, 2, (4, 8), (2,)), transform)
    assert (
        str(report) == "6 convolutions swapped, 3 kept (1 down-sampling by its kernel, 1 transposed, 1 1x1)"
    )
    assert str(SwapReport(["a"])) == "1 convolutions swapped, 0 kept"


@pytest.mark.parametrize(
    ("network", "where", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2)), None, r"no convolution of Sequential could be swapped: 0 .* 0 kept"),
        (
            nn.Sequential(nn.Conv2d(1, 2, 1), nn.ConvTranspose2d(2, 1, 3)),
            None,
            r"2 kept \(1 1x1, 1 transposed\)",
        ),
        (nn.Sequential(nn.Conv2d(2, 2, 3)), "decoder", r"1 not matched by 'decoder'"),
        (
            nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Conv3d(1, 1, 2, 2)),
            None,
            r"1 grouped, 1 down-sampling by its",
        ),
        (nn.Sequential(transform(nn.Conv2d(2, 2, 3))), None, r"1 parametrized already"),
        (nets.MedNeXt(3, 4, 1, 2), None, r"53 1x1, 22 grouped, 5 transposed"),
    ],
)
def test_nothing_swapped_is_an_error(network, where, message):
    with pytest.raises(ValueError, match=message):
        swap_convs(network, transform, where)


# every convolution in one network, and a computed, a factorised and a gated one in each
PAIRS = [
    *(("unet", conv) for conv in LAYERS if conv != "none"),
    *((name, conv) for name in MONAI if name != "unet" for conv in ("smooth", "bottleneck", "se")),
]


@pytest.mark.parametrize(("name", "conv"), PAIRS)
def test_every_convolution_goes_into_every_network(name, conv):
    torch.manual_seed(0)
    build, swapped, kept = MONAI[name]
    network, image = build(), torch.randn(2, 1, 32, 32, 16)
    grid = {"spacing_mm": (1.0, 1.0, 1.0), "example": image} if conv in IN_MM else {}
    if name == "mednext" and conv in UNGROUPED:
        with pytest.raises(
            ValueError, match=r"0 convolutions swapped, 80 kept \(53 1x1, 22 grouped, 5 transposed\)"
        ):
            swap_convs(network, LAYERS[conv], **grid)
        return
    report = swap_convs(network, LAYERS[conv], **grid)
    assert len(report.swapped) == swapped and Counter(report.kept.values()) == kept
    network(image)  # changes the running statistics
    expected, folded = network.eval()(image), fold_convs(network)
    expected, output = (y if isinstance(y, torch.Tensor) else y[0] for y in (expected, folded(image)))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4 * float(expected.detach().std()))
    assert not [m for m in folded.modules() if type(m).__module__.startswith("medconv")]


def test_each_layer_gets_the_spacing_of_its_own_grid():
    network = UNet(3, 1, 2, (4, 6, 8), ((2, 2, 1), 2))
    grids = []

    def note(conv, spacing_mm, scale):
        grids.append((spacing_mm, scale))
        return conv

    report = swap_convs(network, note, spacing_mm=(0.5, 0.5, 2.0), example=torch.zeros(1, 1, 16, 16, 8))
    by_name = dict(zip(report.swapped, grids, strict=True))
    assert by_name["encoder.0.0"] == by_name["decoder.0.3"] == ((0.5, 0.5, 2.0), 1.0)
    assert by_name["encoder.1.0"] == ((1.0, 1.0, 2.0), 2.0)
    assert by_name["encoder.2.3"] == ((2.0, 2.0, 4.0), 4.0)


def test_lengths_in_mm_grow_as_with_the_voxels_that_a_network_was_planned_for():
    """Of 1 x 1 x 4 mm; on cubes, its kernels reach as far in the plane, and no longer along one axis alone."""
    shapes = {}
    for thickness in (4.0, 1.0):
        network = UNet(3, 1, 2, (4, 6, 8), ((2, 2, 1), 2))
        grid = {"spacing_mm": (1.0, 1.0, thickness), "example": torch.zeros(1, 1, 16, 16, 8)}
        swap_convs(network, partial(spacing, reference_mm=1.0), **grid)
        shapes[thickness] = [network.get_submodule(f"encoder.{n}.0").weight.shape[2:4] for n in range(3)]
    assert shapes[1.0] == shapes[4.0] == [(3, 3)] * 3


@pytest.mark.parametrize("voxels", [9, 17, 20, 28, 33, 64])
def test_strides_multiply_where_they_do_not_divide_the_image(voxels):
    """9 voxels become 5, 3 and 2, which are of 2, 4 and 8 mm; the second axis always divides."""
    network = nn.Sequential(*(nn.Conv2d(1, 1, 3, 2, 1) for _ in range(4)))
    found = []

    def note(conv, spacing_mm, scale):
        found.append(spacing_mm)
        return conv

    swap_convs(network, note, spacing_mm=(1.0, 1.0), example=torch.zeros(1, 1, voxels, 64))
    assert found == [(1.0, 1.0), (2.0, 2.0), (4.0, 4.0), (8.0, 8.0)]


def test_sizes_of_unpadded_layers_are_no_parallel_paths():
    """30 voxels become 14, 6 and 2; 6 divides 30 by chance."""
    network = nn.Sequential(*(nn.Conv2d(1, 1, 3, 2) for _ in range(4)))
    found = []

    def note(conv, spacing_mm, scale):
        found.append(spacing_mm[0])
        return conv

    swap_convs(network[:3], note, spacing_mm=(1.0, 1.0), example=torch.zeros(1, 1, 30, 30))
    assert found == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("strides", [(3, 5), (2, 3), (3, 4), (3, 6)])
def test_parallel_paths_have_grids_of_their_own(strides):
    """As in DeepMedic, whose paths see the image at several resolutions."""

    class Paths(nn.Module):
        def __init__(self):
            super().__init__()
            self.paths = nn.ModuleList(nn.Conv2d(1, 1, 3, padding=1) for _ in strides)

        def forward(self, x):
            return [path(F.avg_pool2d(x, stride)) for path, stride in zip(self.paths, strides, strict=True)]

    found = []

    def note(conv, spacing_mm, scale):
        found.append(spacing_mm)
        return conv

    swap_convs(Paths(), note, spacing_mm=(1.0, 1.0), example=torch.zeros(1, 1, 60, 60))
    assert found == [(stride, stride) for stride in strides]


def test_a_convolution_called_by_keyword_has_its_grid():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(1, 1, 3, padding=1)

        def forward(self, x):
            return self.conv(input=x)

    report = swap_convs(Named(), ball, spacing_mm=(1.0, 1.0, 2.0), example=torch.zeros(1, 1, 8, 8, 8))
    assert report.swapped == ["conv"]


def test_taps_of_a_dilated_layer_are_as_far_apart_as_it_says():
    """In slices of 2 mm, two voxels of 1 mm apart within them: a ball is that of even voxels."""
    network = nn.Sequential(nn.Conv3d(1, 1, 3, padding=(1, 2, 2), dilation=(1, 2, 2)))
    swap_convs(network, ball, spacing_mm=(2.0, 1.0, 1.0), example=torch.zeros(1, 1, 8, 16, 16))
    assert int((network[0].weight[0, 0] != 0).sum()) == 19


def test_a_layer_of_other_dimensions_stays():
    """Such as a gate over the channels, one axis in a network of three."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(1, 4, 3, padding=1)
            self.gate = nn.Conv1d(1, 1, 3, padding=1)

        def forward(self, x):
            features = self.conv(x)
            return features * self.gate(features.mean((2, 3, 4))[:, None])[:, 0, :, None, None, None]

    report = swap_convs(Gated(), ball, spacing_mm=(1.0, 1.0, 1.0), example=torch.zeros(1, 1, 8, 8, 8))
    assert report.swapped == ["conv"] and report.kept == {"gate": "of other dimensions"}


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (
            {"spacing_mm": (1.0, 1.0)},
            r"spacing_mm=\(1\.0, 1\.0\) needs an example of 2 spatial axes, got None",
        ),
        ({"spacing_mm": (1.0, 1.0), "example": torch.zeros(1, 1, 8)}, r"2 spatial axes, got \(1, 1, 8\)"),
        (
            {"spacing_mm": (1.0, -1.0), "example": torch.zeros(1, 1, 8, 8)},
            r"positive and finite along every axis, got \(1\.0, -1\.0\)",
        ),
    ],
)
def test_spacing_needs_an_example_and_positive_numbers(grid, message):
    with pytest.raises(ValueError, match=message):
        swap_convs(UNet(2, 1, 2, (4, 8), (2,)), ball, **grid)


def test_other_parametrizations_are_kept_and_not_folded():
    network = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 2, 3)), nn.Conv2d(2, 2, 3))
    assert swap_convs(network, basis).kept == {"0": "parametrized already"}
    folded = fold_convs(network)
    assert parametrize.is_parametrized(folded[0]) and not parametrize.is_parametrized(folded[1])


def test_the_report_has_the_error_of_projected_weights():
    report = swap_convs(UNet(2, 1, 2, (4, 8), (2,)), partial(basis, init_from_weights=True))
    assert set(report.errors) == set(report.swapped) and all(0 < e < 1 for e in report.errors.values())
    assert re.search(r"; weights kept with a relative error of 0\.\d+, 0\.\d+ at most$", str(report))


def test_a_refused_layer_is_named():
    network = nn.ModuleDict({"body": nn.Sequential(nn.ReLU(), nn.Conv2d(2, 2, 4))})
    with pytest.raises(ValueError, match=r"layer body\.1: kernel_size must be odd.*\(4, 4\)"):
        swap_convs(network, transform)


def test_partial_passes_arguments_to_each_layer():
    network = UNet(2, 1, 2, (4, 8), (2,))
    swap_convs(network, partial(transform, transform_channels=3))
    transforms = [p.shape for name, p in network.named_parameters() if name.endswith("original")]
    assert [shape[0] for shape in transforms] == [3] * 6


def test_plain_changes_nothing():
    network = UNet(2, 1, 2, (4, 8), (2,))
    before, layers = deepcopy(network.state_dict()), list(network.modules())
    assert len(swap_convs(network, plain).swapped) == 6
    assert all(a is b for a, b in zip(network.modules(), layers, strict=True))
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_layers_that_share_a_weight_are_kept():
    a, b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    b.weight = a.weight
    network = nn.Sequential(a, b, nn.Conv2d(4, 4, 3, padding=1))
    report = swap_convs(network, basis)
    assert report.swapped == ["2"] and report.kept == {"0": "sharing its weight", "1": "sharing its weight"}
    assert network[0].weight is network[1].weight
    network(torch.randn(1, 4, 5, 5))


def test_a_wrong_regular_expression_is_an_error():
    with pytest.raises(ValueError, match=r"where must be a regular expression, got '\('"):
        swap_convs(nn.Sequential(nn.Conv2d(1, 1, 3)), basis, "(")


def test_a_network_that_is_one_convolution():
    conv = nn.Conv2d(1, 2, 3)
    assert swap_convs(conv, transform).swapped == [""]
    assert sorted(conv.state_dict()) == [
        "bias",
        "parametrizations.weight.0.bank",
        "parametrizations.weight.original",
    ]
    assert type(fold_convs(conv)) is nn.Conv2d
    with pytest.raises(ValueError, match="bare Conv2d cannot be replaced"):
        swap_convs(nn.Conv2d(1, 2, 3), lambda layer: nn.Sequential(layer))


def test_what_is_put_in_must_be_a_module():
    with pytest.raises(ValueError, match="layer 0: it must return a module, it returned a NoneType"):
        swap_convs(nn.Sequential(nn.Conv2d(1, 1, 3)), lambda conv: None)
