"""medconv/models/layers/fast_norm.py: equal to torch's norms, in channels-last."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from monai.networks.nets import DynUNet
from torch import Tensor, nn

from medconv.models.layers.fast_norm import (
    ChannelsLastBatchNorm2d,
    ChannelsLastBatchNorm3d,
    ChannelsLastInstanceNorm2d,
    ChannelsLastInstanceNorm3d,
    ChannelsLastNorm,
    instance_norm,
    swap_norms,
)
from medconv.models.unet import UNet

FORMAT = {4: torch.channels_last, 5: torch.channels_last_3d}
SHAPES = [(2, 5, 7, 4), (3, 6, 4, 5, 3), (1, 4, 3, 2, 5)]
SLOPES = [None, 0.0, 0.01, -0.3]


def drawn(shape, dtype=torch.float64, last=True):
    x = (2 + 3 * torch.randn(shape, dtype=torch.float64)).to(dtype)
    return x.contiguous(
        memory_format=FORMAT[len(shape)] if last else torch.contiguous_format
    ).requires_grad_()


def torch_norm(x, weight, bias, slope):
    y = F.instance_norm(x, weight=weight, bias=bias)
    return y if slope is None else F.leaky_relu(y, slope)


def with_gradients(norm, inputs, slope, grad):
    y = norm(*inputs, slope)
    return [y, *torch.autograd.grad(y, [i for i in inputs if i is not None], grad)]


def ours(x, weight, bias, slope):
    return instance_norm(x, weight, bias, negative_slope=slope)


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("affine", ["both", "scale", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_every_gradient_equal_torchs(shape, affine, last, slope):
    torch.manual_seed(0)
    x, grad = drawn(shape, last=last), torch.randn(shape, dtype=torch.float64)
    weight = None if affine == "none" else torch.randn(shape[1], dtype=x.dtype, requires_grad=True)
    bias = torch.randn(shape[1], dtype=x.dtype, requires_grad=True) if affine == "both" else None
    for output, expected in zip(
        with_gradients(ours, [x, weight, bias], slope, grad),
        with_gradients(torch_norm, [x, weight, bias], slope, grad),
        strict=True,
    ):
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_half_precision_agrees_with_double_precision_and_keeps_fp32_weights(shape, dtype):
    torch.manual_seed(1)
    x, grad = drawn(shape, dtype), torch.randn(shape).to(dtype)
    weight, bias = torch.randn(shape[1], requires_grad=True), torch.randn(shape[1], requires_grad=True)
    output = with_gradients(ours, [x, weight, bias], 0.01, grad)
    exact = with_gradients(
        torch_norm, [t.detach().double().requires_grad_() for t in (x, weight, bias)], 0.01, grad.double()
    )
    assert [g.dtype for g in output] == [dtype, dtype, torch.float32, torch.float32]
    for a, b in zip(output, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0.02, atol=0.02 * float(b.detach().abs().max()))


@pytest.mark.parametrize("grad_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradient_stay_channels_last(shape, dtype, grad_last):
    x = drawn(shape, dtype)
    y = instance_norm(x, negative_slope=0.01)
    grad = drawn(shape, dtype, last=grad_last).detach()
    y.backward(grad)
    assert y.is_contiguous(memory_format=FORMAT[len(shape)]) and not y.is_contiguous()
    assert x.grad.is_contiguous(memory_format=FORMAT[len(shape)]) and not x.grad.is_contiguous()
    with torch.no_grad():
        assert instance_norm(x).is_contiguous(memory_format=FORMAT[len(shape)])
    assert instance_norm(x.contiguous()).is_contiguous()


def test_a_slice_of_channels_stays_channels_last_too():
    x = drawn((2, 8, 3, 4, 5))[:, 2:5]
    y = instance_norm(x)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(y, F.instance_norm(x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("slope", [None, 0.1])
def test_first_and_second_order_gradients_pass_gradcheck(slope):
    torch.manual_seed(2)
    inputs = (drawn((2, 3, 2, 3)), *torch.randn(2, 3, dtype=torch.float64).unbind())
    inputs = tuple(i.detach().clone().requires_grad_() for i in inputs)
    assert inputs[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.autograd.gradcheck(lambda *i: ours(*i, slope), inputs)
    assert torch.autograd.gradgradcheck(lambda *i: ours(*i, slope), inputs)


def test_a_single_voxel_raises_the_error_of_torch():
    for layer, shape in ((nn.InstanceNorm2d(4), (2, 4, 1, 1)), (nn.InstanceNorm3d(4), (2, 4, 1, 1, 1))):
        x = torch.zeros(shape).to(memory_format=FORMAT[len(shape)])
        with pytest.raises(ValueError) as torch_error:
            layer(x)
        swapped = nn.Sequential(layer)
        swap_norms(swapped)
        with pytest.raises(ValueError) as error:
            swapped(x)
        assert str(error.value) == str(torch_error.value)


def test_an_empty_batch_gives_an_empty_result():
    x = torch.zeros(0, 4, 2, 3).to(memory_format=torch.channels_last).requires_grad_()
    y = instance_norm(x, torch.ones(4), torch.zeros(4), negative_slope=0.0)
    assert y.shape == x.shape


def test_autocast_gives_the_dtype_that_torch_gives():
    layer = nn.Sequential(nn.Conv3d(2, 4, 3), nn.InstanceNorm3d(4, affine=True)).to(
        memory_format=torch.channels_last_3d
    )
    x = torch.randn(2, 2, 6, 5, 5).to(memory_format=torch.channels_last_3d)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        assert swap_norms(layer) == 1
        output = layer(x)
        convolved = layer[0](x)  # contiguous where the CPU has no convolution in bf16
    assert output.dtype == expected.dtype and output.stride() == convolved.stride()
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("last", [True, False])
def test_compiles_as_one_graph(last):
    layer = nn.Sequential(nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(0.01, inplace=True)).double()
    x, plain = drawn((2, 4, 3, 4, 5), last=last), deepcopy(layer)
    swap_norms(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    output, expected = compiled(x), plain(x)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum(), x)[0] for y in (output, expected)), rtol=1e-8, atol=1e-8
    )
    assert output.is_contiguous(memory_format=torch.channels_last_3d) == last


def test_every_norm_of_a_swapped_network_returns_channels_last():
    network = UNet(3, 1, 2, (4, 6, 8), (2, 2), norm="instance").to(memory_format=torch.channels_last_3d)
    swap_norms(network)
    channels_last = []
    for m in network.modules():
        if isinstance(m, ChannelsLastNorm):
            m.register_forward_hook(
                lambda _, __, y: channels_last.append(y.is_contiguous(memory_format=torch.channels_last_3d))
            )
    network(torch.randn(2, 1, 8, 8, 8).to(memory_format=torch.channels_last_3d))
    assert len(channels_last) == 10 and all(channels_last)


def test_a_norm_built_with_running_statistics_uses_them():
    x = drawn((2, 3, 4, 4), torch.float32).detach()
    layer, plain = (
        ChannelsLastInstanceNorm2d(3, track_running_stats=True),
        nn.InstanceNorm2d(3, track_running_stats=True),
    )
    for _ in range(2):
        torch.testing.assert_close(layer(x), plain(x))
        torch.testing.assert_close(layer.running_mean, plain.running_mean)
        layer.eval(), plain.eval()


def test_unbatched_input_and_a_wrong_number_of_channels_behave_as_in_torch():
    layer = ChannelsLastInstanceNorm3d(3, affine=True)
    layer.negative_slope = 0.0
    x = torch.randn(3, 3, 2, 2)
    torch.testing.assert_close(layer(x), nn.InstanceNorm3d(3, affine=True)(x).relu())
    with pytest.raises(ValueError, match="num_features"):
        layer(torch.randn(2, 4, 3, 3, 3))
    with pytest.raises(ValueError, match="4D or 5D"):
        layer(torch.randn(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [torch.float32, torch.bfloat16, None], ids=str)
def test_without_gradients_the_output_is_bitwise_the_same(dtype, affine):
    torch.manual_seed(0)
    x = drawn((3, 5, 4, 3, 6), dtype)
    weight, bias = (None, None) if affine is None else torch.rand(2, 5, dtype=affine).unbind()
    if (dtype, affine) == (torch.float32, torch.bfloat16):
        pytest.skip("torch's batch norm has no half-precision weights for fp32")
    expected = instance_norm(x, weight, bias, negative_slope=0.1)
    with torch.no_grad():
        assert torch.equal(instance_norm(x, weight, bias, negative_slope=0.1), expected)


@pytest.mark.parametrize("slope", [None, 0.1])
@pytest.mark.parametrize("settings", [{}, {"momentum": None}, {"track_running_stats": False}], ids=str)
@pytest.mark.parametrize("dims", [2, 3])
def test_a_batch_norm_on_a_cpu_is_torchs_and_the_activation(dims, settings, slope):
    """Bit for bit, and so are its running statistics."""
    torch.manual_seed(0)
    plain = (nn.BatchNorm2d if dims == 2 else nn.BatchNorm3d)(5, **settings)
    layer = (ChannelsLastBatchNorm2d if dims == 2 else ChannelsLastBatchNorm3d)(5, **settings)
    layer.negative_slope = slope
    for is_training in (True, True, False):
        x = drawn((3, 5, 4, 3, 6)[: dims + 2], torch.float32).detach()
        expected = plain.train(is_training)(x)
        expected = expected if slope is None else F.leaky_relu(expected, slope)
        assert torch.equal(layer.train(is_training)(x), expected)
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in layer.state_dict().items())


def test_a_batch_norm_raises_the_errors_of_torch():
    for x in (torch.zeros(2, 5, 3, 3, 3), torch.zeros(2, 4), torch.zeros(1, 4, 1, 1, 1)):
        messages = []
        for layer in (ChannelsLastBatchNorm3d(4), nn.BatchNorm3d(4)):
            with pytest.raises((ValueError, RuntimeError)) as error:
                layer(x)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


NORMS = (nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def dynunet():
    return DynUNet(
        3, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), filters=(4, 8, 8), norm_name=("INSTANCE", {"affine": True})
    )


def medconv_unet(dims, norm="instance"):
    return UNet(dims, 1, 2, (4, 6, 8), (2, 2), norm=norm)


# Network, its axes, the number of norms, and of those fused with an activation.
NETWORKS = {
    "dynunet": (dynunet, 3, 10, 0),
    "unet 3d": (lambda: medconv_unet(3), 3, 10, 10),
    "unet 2d": (lambda: medconv_unet(2), 2, 10, 10),
    "unet 3d, batch norm": (lambda: medconv_unet(3, "batch"), 3, 10, 10),
    "unet 2d, batch norm": (lambda: medconv_unet(2, "batch"), 2, 10, 10),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_swapped_network_is_the_same_network(name, training):
    torch.manual_seed(3)
    build, dims, norms, fused = NETWORKS[name]
    plain = build().double().train(training).to(memory_format=FORMAT[dims + 2])
    for p in plain.parameters():
        p.data += 0.1 * torch.randn_like(p)
    network = deepcopy(plain)
    parameters, modules = dict(network.named_parameters()), dict(network.named_modules())
    assert swap_norms(network) == norms

    assert list(network.state_dict()) == list(plain.state_dict())
    assert all(p is parameters[n] for n, p in network.named_parameters())
    assert list(modules) == [n for n, _ in network.named_modules()]
    assert all(m.training == training for m in network.modules())
    assert not any(type(m) in NORMS for m in network.modules())
    assert (
        sum(isinstance(m, ChannelsLastNorm) and m.negative_slope == 0.01 for m in network.modules()) == fused
    )
    assert sum(isinstance(m, nn.Identity) for m in network.modules()) == fused + sum(
        isinstance(m, nn.Identity) for m in plain.modules()
    )
    assert all(isinstance(m, NORMS) for m in network.modules() if isinstance(m, ChannelsLastNorm))

    x = drawn((2, 1, *[16] * dims)[: dims + 2])
    for copy in (network, deepcopy(network)):
        copy.load_state_dict(plain.state_dict())
        output, expected = copy(x), plain(x)
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
        grads = [
            torch.autograd.grad(y.square().mean(), [x, *n.parameters()], allow_unused=True)
            for y, n in ((output, copy), (expected, plain))
        ]
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-6, atol=1e-9)
    assert swap_norms(network) == 0
    torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-9)


def test_norms_with_running_statistics_and_subclasses_are_not_swapped():
    class Own(nn.InstanceNorm2d):
        pass

    network = nn.Sequential(
        nn.InstanceNorm2d(3, track_running_stats=True), nn.ReLU(), Own(3), nn.ReLU(), nn.InstanceNorm1d(3)
    )
    kinds = [type(m) for m in network]
    assert swap_norms(network) == 0
    assert [type(m) for m in network] == kinds


class Block(nn.Sequential):
    """A subclass of `nn.Sequential`, as `ConvBlock` is."""


def twice(norm, act):
    return [Block(norm, act), Block(nn.Conv2d(2, 2, 1), act)]


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


class Reversed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](self[1](x))


KEPT = {
    "activation elsewhere too": lambda: twice(nn.InstanceNorm2d(2), nn.ReLU()),
    "norm elsewhere too": lambda: [Block(n := nn.InstanceNorm2d(2), nn.ReLU()), Block(n, nn.Conv2d(2, 2, 1))],
    "activation hooked": lambda: [Block(nn.InstanceNorm2d(2), hooked(nn.ReLU()))],
    "norm hooked": lambda: [Block(hooked(nn.InstanceNorm2d(2)), nn.ReLU())],
    "forward of its own": lambda: [Reversed(nn.InstanceNorm2d(2), nn.ReLU())],
    "a plain sequential, which others may walk through": lambda: [
        nn.Sequential(nn.InstanceNorm2d(2), nn.ReLU())
    ],
    "something between": lambda: [Block(nn.InstanceNorm2d(2), nn.Conv2d(2, 2, 1), nn.ReLU())],
    "another activation": lambda: [Block(nn.InstanceNorm2d(2), nn.ELU())],
    "no sequential": lambda: [nn.ModuleList([nn.InstanceNorm2d(2), nn.ReLU()])],
}


@pytest.mark.parametrize("name", KEPT)
def test_an_activation_that_cannot_be_fused_stays(name):
    network = nn.ModuleList(KEPT[name]())
    before = dict(network.named_modules(remove_duplicate=False))
    assert swap_norms(network) == 1
    assert all(m is before[n] for n, m in network.named_modules(remove_duplicate=False))
    assert all(m.negative_slope is None for m in network.modules() if isinstance(m, ChannelsLastNorm))


def test_a_shared_block_is_fused_once():
    block = Block(nn.InstanceNorm2d(2), nn.LeakyReLU(0.2))
    network = Block(block, nn.Conv2d(2, 2, 1), block).double()
    x = drawn((2, 2, 5, 4))
    expected = network(x)
    assert swap_norms(network) == 1 and isinstance(block[1], nn.Identity) and "0.2" in repr(block[0])
    assert swap_norms(network) == 0
    torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-10)


def test_batch_norms_stay_where_the_trainer_replaces_them():
    """`nn.SyncBatchNorm` knows no activation, so nothing is fused into them."""
    network = nn.Sequential(Block(nn.BatchNorm3d(2), nn.ReLU()), Block(nn.InstanceNorm3d(2), nn.ReLU()))
    assert swap_norms(network, keep_batch_norms=True) == 1
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    assert type(synced[0][0]) is nn.SyncBatchNorm and isinstance(synced[0][1], nn.ReLU)
    assert isinstance(synced[1][0], ChannelsLastNorm)
