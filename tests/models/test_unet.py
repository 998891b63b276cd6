"""medconv/models/unet.py: shapes, the layers between stages, and the errors for lists that do not fit."""

import pytest
import torch
from torch import nn

from medconv.models.unet import UNet

SHAPES = {
    "2d": ({"spatial_dims": 2, "channels": (4, 8), "strides": (2,)}, (6, 8), (2, 2)),
    "3d": ({"spatial_dims": 3, "channels": (4, 6, 8), "strides": (2, 2)}, (4, 8, 12), (4, 4, 4)),
    "anisotropic": (
        {
            "spatial_dims": 3,
            "channels": (4, 6, 8),
            "strides": ((2, 2, 1), (2, 2, 2)),
            "kernel_size": ((3, 3, 1), 3, (3, 5, 3)),
        },
        (8, 4, 6),
        (4, 4, 2),
    ),
    "stride 3": (
        {"spatial_dims": 2, "channels": (4, 6), "strides": ((3, 2),), "norm": "instance"},
        (9, 4),
        (3, 2),
    ),
    "one stage": ({"spatial_dims": 2, "channels": (4,), "strides": ()}, (3, 5), (1, 1)),
    "strided, one convolution in the middle": (
        {
            "spatial_dims": 3,
            "channels": (4, 6, 8),
            "strides": ((1, 2, 2), 2),
            "kernel_size": ((1, 3, 3), 3, 3),
            "convs_per_stage": (2, 1, 3),
            "norm": "instance",
            "strided": True,
        },
        (4, 8, 12),
        (2, 4, 4),
    ),
    "three convolutions a stage": (
        {"spatial_dims": 2, "channels": (4, 6), "strides": (2,), "convs_per_stage": 3},
        (4, 4),
        (2, 2),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_output_has_the_size_of_the_input(name):
    arguments, size, divisor = SHAPES[name]
    network = UNet(in_channels=2, out_channels=3, **arguments)
    assert network.divisor == divisor
    output = network(torch.randn(2, 2, *size))
    assert output.shape == (2, 3, *size)
    output.square().mean().backward()
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_a_size_that_divisor_does_not_divide_is_refused(name):
    arguments, size, divisor = SHAPES[name]
    network = UNet(in_channels=1, out_channels=2, **arguments)
    with pytest.raises(ValueError, match=r"divisible by .* got"):
        network(torch.randn(1, 1, *size, 4))
    for axis in range(len(size)):
        if divisor[axis] > 1:
            wrong = tuple(n + (a == axis) for a, n in enumerate(size))
            with pytest.raises(ValueError) as error:
                network(torch.randn(1, 1, *wrong))
            assert f"divisible by {divisor}" in str(error.value) and f"got {wrong}" in str(error.value)


def test_stages_are_joined_by_convolutions_whose_kernel_is_their_stride():
    arguments, _, _ = SHAPES["anisotropic"]
    network = UNet(in_channels=1, out_channels=2, **arguments)
    for layers in (network.down, network.up):
        assert [(layer.kernel_size, layer.stride) for layer in layers] == [((2, 2, 1),) * 2, ((2, 2, 2),) * 2]
    assert all(layer.padding == (0, 0, 0) for layer in [*network.down, *network.up])


def test_kernels_and_channels_of_every_stage():
    arguments, _, _ = SHAPES["anisotropic"]
    network = UNet(in_channels=2, out_channels=3, **arguments)
    blocks = [*network.encoder, *network.decoder]
    convs = [[layer for layer in block if isinstance(layer, nn.Conv3d)] for block in blocks]
    assert [[(c.in_channels, c.out_channels) for c in block] for block in convs] == [
        [(2, 4), (4, 4)],
        [(6, 6), (6, 6)],
        [(8, 8), (8, 8)],
        [(8, 4), (4, 4)],
        [(12, 6), (6, 6)],
    ]
    kernels = [(3, 3, 1), (3, 3, 3), (3, 5, 3), (3, 3, 1), (3, 3, 3)]
    assert [[c.kernel_size for c in block] for block in convs] == [[kernel] * 2 for kernel in kernels]
    assert all(c.bias is None for block in convs for c in block)  # the norm has one


def test_each_skip_connects_the_two_blocks_of_a_stage():
    network, image = UNet(2, 1, 2, (4, 6, 8), (2, 2)).eval(), torch.randn(2, 1, 8, 12)
    fine = network.encoder[0](image)
    middle = network.encoder[1](network.down[0](fine))
    coarse = network.encoder[2](network.down[1](middle))
    middle = network.decoder[1](torch.cat([middle, network.up[1](coarse)], 1))
    fine = network.decoder[0](torch.cat([fine, network.up[0](middle)], 1))
    torch.testing.assert_close(network(image), network.head(fine))


@pytest.mark.parametrize(("norm", "kind"), [("batch", nn.BatchNorm3d), ("instance", nn.InstanceNorm3d)])
def test_norm_has_scale_and_shift(norm, kind):
    network = UNet(3, 1, 2, (4, 8), (2,), norm=norm)
    norms = [layer for layer in network.modules() if "Norm" in type(layer).__name__]
    assert len(norms) == 6 and all(type(layer) is kind and layer.weight is not None for layer in norms)


@pytest.mark.parametrize("axis", [2, 3])
def test_mirror_symmetric_kernels_make_a_mirror_symmetric_network(axis):
    torch.manual_seed(0)
    network = UNet(2, 1, 2, (4, 6, 8), (2, 2), kernel_size=(3, 5, 3)).eval()
    image = torch.randn(1, 1, 8, 12)
    assert not torch.allclose(network(image.flip(axis)), network(image).flip(axis), atol=1e-3)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 4:
                parameter.copy_((parameter + parameter.flip(axis)) / 2)
                assert name.endswith("weight")
    torch.testing.assert_close(network(image.flip(axis)), network(image).flip(axis), rtol=1e-4, atol=1e-5)


def test_initial_activations_neither_vanish_nor_explode():
    torch.manual_seed(0)
    network = UNet(3, 1, 3, (8, 16, 32), (2, 2))
    output = network(torch.randn(2, 1, 8, 8, 8))
    assert 0.3 < float(output.detach().std()) < 5
    assert all(
        float(layer.bias.detach().abs().max()) == 0 for layer in [*network.down, *network.up, network.head]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels": (4, 8), "strides": (2, 2)}, r"strides .*channels \(2\), got 2"),
        ({"channels": (4, 8, 16), "strides": (2,)}, r"strides .*channels \(3\), got 1"),
        ({"strides": ((2, 2, 2),)}, r"strides: needs 2 positive numbers.*got \(2, 2, 2\)"),
        ({"strides": ((2, 0),)}, r"strides: needs 2 positive numbers.*got \(2, 0\)"),
        ({"kernel_size": 4}, r"kernel_size must be odd.*got 4"),
        ({"kernel_size": (3, (3, 2))}, r"kernel_size must be odd.*got \(3, \(3, 2\)\)"),
        ({"kernel_size": (3, 3, 3)}, r"kernel_size .*have 2 entries.*got 3"),
        ({"kernel_size": (3, (3, 3, 3))}, r"kernel_size: needs 2 positive numbers.*got \(3, 3, 3\)"),
        ({"norm": "layer"}, r"norm must be one of \['batch', 'instance'\], got 'layer'"),
        ({"spatial_dims": 1}, r"spatial_dims must be 2 or 3, got 1"),
    ],
)
def test_errors_name_the_argument_and_its_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        UNet(
            **{
                "spatial_dims": 2,
                "in_channels": 1,
                "out_channels": 2,
                "channels": (4, 8),
                "strides": (2,),
                **arguments,
            }
        )


def test_strided_stages_have_no_layers_between_them():
    network = UNet(2, 1, 2, channels=(4, 8), strides=(2,), strided=True)
    first = network.encoder[1][0]
    assert (first.in_channels, first.out_channels, first.stride, first.kernel_size) == (4, 8, (2, 2), (3, 3))
    assert network.encoder[1][3].stride == network.decoder[0][0].stride == (1, 1)
    assert not any(name.startswith("down") for name in network.state_dict())


@pytest.mark.parametrize("convs", [(2,), (2, 2, 2), (2, 0), 0])
def test_convolutions_per_stage_fit_the_stages(convs):
    with pytest.raises(ValueError, match="convs_per_stage must be one number from 1, or 2, got"):
        UNet(2, 1, 2, channels=(4, 8), strides=(2,), convs_per_stage=convs)
