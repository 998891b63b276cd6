"""medconv/features/equivariance/equivariant.py: networks that commute with flips and turns, and those that cannot;
kernels by their definition, and statistics that copies share.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import product

import numpy as np
import pytest
import torch
from monai.networks import nets
from torch import Tensor, nn

from medconv.convs import fold_convs, mirror_axes, swap_convs
from medconv.features.equivariance.equivariant import Equivariant, GroupPrior, SharedBatchNorm
from medconv.features.equivariance.group import Group
from medconv.features.image_level.encoder import Encoder
from medconv.models.deep_supervision import DeepSupervision
from medconv.models.unet import UNet

NETWORKS = {
    "unet 3d": (lambda: UNet(3, 1, 3, (8, 16, 16), (2, (1, 2, 2))), 3),
    "unet 2d, instance norm": (lambda: UNet(2, 2, 3, (8, 16), (2,), norm="instance"), 2),
    "unet 2d, 5-kernels": (lambda: UNet(2, 1, 2, (8, 16), (2,), kernel_size=(5, 3)), 2),
    "monai basicunet": (lambda: nets.BasicUNet(3, 1, 2, features=(8, 8, 16, 16, 16, 8)), 3),
    # Residual units join stages by addition.
    "monai unet without strides": (
        lambda: nets.UNet(2, 1, 3, (8, 8, 8), (1, 1), num_res_units=2, norm=("group", {"num_groups": 1})),
        2,
    ),
    "activations with a parameter per channel": (
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.PReLU(8), nn.AvgPool2d(2), nn.Conv2d(8, 2, 1)),
        2,
    ),
}


def perturbed(network):
    """Changes biases, norms and running statistics, whose initial values are the same in all copies."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in (p for p in network.parameters() if p.ndim == 1):
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
        for name, b in network.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                b.add_(0.1 * torch.rand(b.shape, generator=generator))
    return network


def mirrored(name, axes):
    torch.manual_seed(0)
    build, dims = NETWORKS[name]
    network = build()
    channels = 2 if "2d, instance" in name else 1
    size = [32, 16, 16] if "basicunet" in name else [16] * dims
    image = torch.randn(2, channels, *size)
    swap_convs(network, Equivariant(axes), example=image)
    return perturbed(network), image


CASES = [(name, axes) for name, (_, dims) in NETWORKS.items() for axes in ((1,), tuple(range(dims)))]


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case == ("monai basicunet", (0, 1, 2)) else [])
        for case in CASES
    ],
)
@torch.no_grad()
def test_the_network_commutes_with_every_flip_of_the_group(name: str, axes: tuple[int, ...]) -> None:
    network, image = mirrored(name, axes)
    for training in (True, False):
        network.train(training)
        # Batch norm in training mode moves its statistics: each view starts from the same ones.
        output = deepcopy(network)(image)
        for flips in product((False, True), repeat=len(axes)):
            dims = [2 + axis for axis, flip in zip(axes, flips, strict=True) if flip]
            a, b = deepcopy(network)(image.flip(dims)), output.flip(dims)
            assert float((a - b).abs().max()) < 1e-4
    assert float(network(image).std()) > 1e-2  # not a constant


@pytest.mark.parametrize(("name", "axes"), [c for c in CASES if len(c[1]) < 3])
def test_parameters_shrink_by_the_size_of_the_group(name, axes):
    before = sum(p.numel() for p in NETWORKS[name][0]().parameters())
    after = sum(p.numel() for p in mirrored(name, axes)[0].parameters())
    slack = (
        0.002 if "unet 3d" in name or "basicunet" in name else 0.05
    )  # layers between two plain images are only symmetrised
    assert after / before == pytest.approx(0.5 ** len(axes), abs=slack)


@pytest.mark.parametrize("name", NETWORKS)
def test_folding_gives_a_plain_network_with_equal_output(name):
    network, image = mirrored(name, (0, 1))
    network.eval()
    folded, plain = fold_convs(network), NETWORKS[name][0]()
    torch.testing.assert_close(folded(image), network(image), rtol=1e-5, atol=1e-5)
    assert not [m for m in folded.modules() if type(m).__module__.startswith("medconv.convs")]
    assert {k: v.shape for k, v in folded.state_dict().items()} == {
        k: v.shape for k, v in plain.state_dict().items()
    }
    assert mirror_axes(network) == (0, 1) and mirror_axes(folded) == () == mirror_axes(plain)


@pytest.mark.parametrize(
    ("width", "conv", "words"),
    [
        (16, Equivariant(axes=(0,)), None),
        (8, Equivariant(axes=(0,)), "layer encoder.0.0 has 8 channels, which are 4 filters in 2 copies; "),
        (
            8,
            Equivariant((0,), ((0, 1),)),
            "layer encoder.0.0 has 8 channels, which are 1 filters in 8 copies; ",
        ),
    ],
)
def test_a_network_with_few_filters_is_doubted(width, conv, words):
    network = UNet(2, 1, 2, (width, 16), (2,))
    swap_convs(network, conv, example=torch.zeros(1, 1, 16, 16))
    doubts = conv.doubts(network)
    assert [doubt.startswith(words) for doubt in doubts] == ([] if words is None else [True])


@pytest.mark.parametrize(
    ("spacing_mm", "words"),
    [
        (None, []),
        ([1.0, 1.01, 4.0], []),
        ([1.0, 1.5, 1.0], ["voxels of the plane [0, 1] are 1 x 1.5 mm, so that a turn by 90 degrees"]),
    ],
)
def test_a_plane_of_other_than_squares_is_doubted(spacing_mm, words):
    doubts = Equivariant((0,), ((0, 1),), spacing_mm=spacing_mm).doubts(nn.Sequential())
    assert [doubt.startswith(word) for doubt, word in zip(doubts, words, strict=True)] == [True] * len(words)


def test_init_from_weights_keeps_an_equivariant_network():
    network, image = mirrored("unet 3d", (0,))
    network.eval()
    folded = fold_convs(network)
    report = swap_convs(folded, Equivariant((0,), init_from_weights=True), example=image)
    torch.testing.assert_close(folded.eval()(image), network(image), rtol=1e-4, atol=1e-4)
    assert len(report.errors) == len(report.swapped) and max(report.errors.values()) < 1e-5
    assert "weights kept with a relative error" in str(report)


def test_a_shared_batch_norm_stays_shared():
    norm = nn.BatchNorm2d(4)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), norm, nn.Conv2d(4, 4, 3, padding=1), norm, nn.Conv2d(4, 1, 1)
    )
    swap_convs(network, Equivariant((0,)), example=torch.randn(2, 1, 8, 8))
    assert network[1] is network[3]


class Untied(nn.Module):
    """Adds a number per channel that is not shared between copies."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.offset = nn.Parameter(torch.zeros(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.conv(x) + self.offset).relu())


class Joined(nn.Module):
    """Concatenates the image with features of it, which are then no fields: layers around are only symmetrised."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(5, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([x, self.conv(x)], 1))


@pytest.mark.parametrize(
    ("build", "shape", "axes", "message"),
    [
        (lambda: nets.UNet(3, 1, 2, (8, 16), (2,), num_res_units=2), (16,) * 3, (0,), r"layer model\.0\.\S+ "
                                                                                      r"\(Conv3d\)"),
        (lambda: nets.DynUNet(3, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[8, 16, 16]), (16,) * 3, (1,), r"layer \S+conv "
                                                                                                          r"\(Conv3d\)"),
        (lambda: nets.SegResNet(3, init_filters=16, out_channels=2), (16,) * 3, (0,), r"layer down_layers\.1\.0\S* "
                                                                                      r"\(Conv3d\)"),
        (lambda: UNet(2, 1, 2, (6, 8), (2,)), (16, 16), (0, 1), r"layer encoder\.0\.0: channels must be "
                                                                r"divisible by 4.*got 6"),
        (lambda: UNet(2, 1, 2, (8, 8), (2,)), (16, 16), (2,), r"axes must lie below 2.*got \[2\]"),
        (Untied, (8, 8), (0,), r"breaks it"),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(4, 4), nn.Conv2d(4, 1, 3)), (8, 8), (0,), r"groups of 1 channels "
                                                                                                          r"split"),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 1, 3)), (8, 8), (0,), r"layer 1: needs groups=1 "
                                                                                                                    r"or"),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 2)), (8, 8), (0,), r"layer 1 \(Flatten\)|layer 2 "
                                                                                                   r"\(Linear\)"),
    ],
)  # fmt: skip
def test_networks_that_cannot_be_equivariant_are_refused_by_layer(build, shape, axes, message):
    torch.manual_seed(0)
    network = build()
    before = deepcopy(network.state_dict())
    with pytest.raises(ValueError, match=message):
        swap_convs(network, Equivariant(axes), example=torch.randn(2, 1, *shape))
    assert network.state_dict().keys() == before.keys()  # a refused network is unchanged
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


@pytest.mark.parametrize("groups", [4, 1])
def test_depthwise_layers_and_concatenated_images_work(groups):
    torch.manual_seed(0)
    chain = [nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=groups), nn.Conv2d(4, 2, 1)]
    network = nn.Sequential(*chain) if groups == 4 else Joined()
    image = torch.randn(2, 1, 8, 8)
    swap_convs(network, Equivariant((0, 1)), example=image)
    for dims in ([2], [3], [2, 3]):
        torch.testing.assert_close(network(image.flip(dims)), network(image).flip(dims), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("axes", "planes", "message"),
    [
        ((0, 0), (), "axes must be different spatial axes, counted from 0, got"),
        ((-1,), (), "axes must be different spatial axes, counted from 0, got"),
        ((), ((1, 1),), "axes must be different spatial axes, counted from 0, got"),
        ((), ((0, 1, 2),), r"planes must be pairs of spatial axes, such as \[\[0, 1\]\], got"),
        ((), (), "axes or planes must name a spatial axis"),
    ],
)
def test_wrong_axes_are_refused(axes, planes, message):
    with pytest.raises(ValueError, match=message):
        Equivariant(axes, planes)


def test_errors_of_swap_convs_name_what_mirror_needs():
    network = UNet(2, 1, 2, (8, 8), (2,))
    with pytest.raises(ValueError, match=r"Equivariant needs `example`"):
        swap_convs(network, Equivariant((0,)))
    with pytest.raises(ValueError, match=r"where must be None, got 'encoder'"):
        swap_convs(network, Equivariant((0,)), "encoder", example=torch.zeros(2, 1, 8, 8))
    with pytest.raises(ValueError, match=r"no convolution of Identity"):
        swap_convs(nn.Identity(), Equivariant((0,)), example=torch.zeros(2, 1, 8, 8))


def test_layers_that_a_forward_pass_does_not_use_are_kept():
    network = UNet(2, 1, 2, (8, 8), (2,))
    network.spare = nn.Conv2d(1, 3, 3)
    report = swap_convs(network, Equivariant((0,)), example=torch.zeros(2, 1, 8, 8))
    assert report.kept == {"spare": "unused"}


QUARTERS = {
    "flips and turns of a picture": (2, (0,), ((0, 1),), 8),
    "turns alone": (2, (), ((0, 1),), 4),
    "turns in the plane of a volume's slices": (3, (0,), ((0, 1),), 8),
    "all motions of a cube": (3, (0,), ((0, 1), (1, 2)), 48),
}


@pytest.mark.parametrize(("dims", "axes", "planes", "copies"), QUARTERS.values(), ids=QUARTERS)
@torch.no_grad()
def test_the_network_commutes_with_flips_and_turns(
    dims: int, axes: tuple[int, ...], planes: tuple[tuple[int, int], ...], copies: int
) -> None:
    torch.manual_seed(0)
    network = UNet(dims, 1, 2, (copies, copies), (2,))
    plain_weights = sum(p.numel() for p in network.parameters())
    image = torch.randn(1, 1, *[8] * dims)
    swap_convs(network, Equivariant(axes, planes), example=image)
    assert sum(p.numel() for p in network.parameters()) / plain_weights == pytest.approx(1 / copies, abs=0.01)
    perturbed(network).eval()
    logits = network(image)
    turned = [(2 + first, 2 + second) for first, second in planes]
    for dims_of_turn in turned:
        torch.testing.assert_close(
            network(image.rot90(1, dims_of_turn)), logits.rot90(1, dims_of_turn), rtol=1e-4, atol=1e-4
        )
    flip_error = float((network(image.flip(2)) - logits.flip(2)).abs().max() / logits.std())
    assert (flip_error < 1e-3) == (0 in axes)
    torch.testing.assert_close(fold_convs(network)(image), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dims", "axes", "planes", "copies"), QUARTERS.values(), ids=QUARTERS)
def test_a_group_is_closed_and_starts_with_no_motion(dims, axes, planes, copies):
    group, image = Group(dims, axes, planes), torch.randn(1, 1, *[3] * dims)
    assert len(group) == len(set(group.elements)) == copies
    assert group.elements[0](image, 2).equal(image)
    for h, g in product(range(min(copies, 8)), repeat=2):
        one_by_one = group.elements[h](group.elements[g](image, 2), 2)
        assert group.elements[group.products[h][g]](image, 2).equal(one_by_one)
    for element, inverse in zip(group.elements, group.inverses, strict=True):
        assert group.elements[inverse](element(image, 2), 2).equal(image)


@pytest.mark.parametrize(("rows", "columns"), [(True, True), (True, False), (False, True), (False, False)])
def test_right_inverse_recovers_the_kernels_of_turns(rows, columns):
    prior = GroupPrior((3, 3), Group(2, (0,), ((0, 1),)), rows, columns)
    weight = prior(torch.randn(2, 9, 3 * (8 if rows and columns else 1)))
    torch.testing.assert_close(prior(prior.right_inverse(weight)), weight)


def test_turns_need_what_is_equal_along_both_axes():
    network = UNet(2, 1, 2, (8, 8), ((1, 2),))
    with pytest.raises(ValueError, match=r"layer .*turns need an equal kernel_size along axes 0 and 1, got"):
        swap_convs(network, Equivariant((), ((0, 1),)), example=torch.zeros(1, 1, 16, 16))


@pytest.mark.parametrize("axes", [(0,), (1, 2), (2, 0, 1)])
@pytest.mark.parametrize(("rows", "columns"), [(True, True), (True, False), (False, True), (False, False)])
def test_kernels_follow_the_definition(axes, rows, columns):
    size, copies = (3, 1, 3), 2 ** len(axes)
    prior = GroupPrior(size, Group(3, axes), rows, columns)
    own = torch.randn(2, 9, 3 * (copies if rows and columns else 1))
    weight, kernel = prior(own).numpy(), own.numpy().reshape(2, *size, -1)
    elements = list(product((0, 1), repeat=len(axes)))

    def flipped(values, element):
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
def test_right_inverse_recovers_the_kernels(rows, columns):
    prior = GroupPrior((3, 3), Group(2, (0, 1)), rows, columns)
    weight = prior(torch.randn(2, 9, 3 * (4 if rows and columns else 1)))
    torch.testing.assert_close(prior(prior.right_inverse(weight)), weight)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_batch_norm_shares_statistics_among_copies(layout):
    norm, plain = SharedBatchNorm(nn.BatchNorm3d(3), 2), nn.BatchNorm3d(3)
    x = torch.randn(2, 6, 4, 4, 4).contiguous(memory_format=layout)
    expected = plain(torch.cat([x[:, ::2], x[:, 1::2]], 2))  # copies side by side in space
    output = norm(x)
    assert output.is_contiguous(memory_format=layout)
    torch.testing.assert_close(output[:, ::2], expected[:, :, :4], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output[:, 1::2], expected[:, :, 4:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.norm.running_var, plain.running_var)


def test_the_whole_network_s_symmetry_is_not_shared():
    with pytest.raises(ValueError, match=r"share must be 1, got 0.5"):
        swap_convs(
            nn.Sequential(nn.Conv2d(2, 2, 3)), Equivariant((0,)), share=0.5, example=torch.zeros(1, 2, 4, 4)
        )


@pytest.mark.parametrize("axes", [(0,), (0, 1)])
def test_mirror_makes_the_logits_invariant_to_flips(axes):
    torch.manual_seed(0)
    network, image = Encoder(2, 1, 3, [8, 16], [2]), torch.randn(4, 1, 8, 8)
    swap_convs(network, Equivariant(axes), example=image)
    for form in (network.eval(), fold_convs(network)):
        for axis in axes:
            torch.testing.assert_close(form(image.flip(2 + axis)), form(image), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(network(image), network(image.transpose(2, 3)), atol=1e-3)


def unet(spatial_dims=2, channels=(4, 6, 8, 10, 12)):
    torch.manual_seed(0)
    return UNet(spatial_dims, 1, 3, channels, (2,) * (len(channels) - 1), norm="instance")


@pytest.mark.parametrize("axes", [(0,), (0, 1)])
def test_heads_of_an_equivariant_network_are_equivariant(axes):
    network, image = unet(channels=(8, 8, 8, 8, 8)), torch.randn(1, 1, 32, 32)
    swap_convs(network, Equivariant(axes), example=image)
    supervision = DeepSupervision(network, 3)
    outputs = supervision(network, image)
    for axis in axes:
        for plain, flipped in zip(outputs, supervision(network, image.flip(2 + axis)), strict=True):
            torch.testing.assert_close(flipped, plain.flip(2 + axis), rtol=1e-4, atol=1e-5)
    logits = network.eval()(image)
    torch.testing.assert_close(fold_convs(network)(image), logits, rtol=1e-4, atol=1e-5)
