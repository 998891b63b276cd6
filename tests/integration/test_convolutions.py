"""What every convolution of medconv.convs must hold, alone and in training: gradients, precision, memory
format, folding, compilation, two processes. A new one is added in tests/helpers/conv_family.py.
"""

import io
import os
import shutil
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import ranks
from helpers.conv_family import (
    ALL,
    CASES,
    CONV,
    LAYERS,
    NOT_LINEAR,
    UNGROUPED,
    build,
    dense_weight,
    dims_of,
    image,
)
from reference.convolution import convolve
from torch import nn
from torch.utils.checkpoint import checkpoint

from medconv.convs import fold_convs, swap_convs
from medconv.features.equivariance.equivariant import Equivariant

LAYOUT = {2: torch.channels_last, 3: torch.channels_last_3d}
GEOMETRIES = [
    {"padding": 0},
    {"padding": "same"},
    {"padding": "valid"},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": 2},
    {"stride": 3, "padding": 2, "dilation": 2},
    {"padding": 1, "padding_mode": "circular"},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 1, "padding_mode": "replicate", "stride": 2, "bias": False},
    {"padding": "same", "padding_mode": "circular"},
    {"groups": 2, "padding": 1},
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: " ".join(f"{k}={v}" for k, v in g.items()))
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in NOT_LINEAR])
def test_every_geometry_equals_the_dense_convolution_or_is_refused(name, geometry):
    dims = dims_of(name)[0]
    plain = CONV[dims](4, 6, 3, **geometry)
    if geometry.get("groups") and name in UNGROUPED:
        with pytest.raises(ValueError, match=f"conv={name} needs groups=1, got 2"):
            build(name, dims, conv=plain)
        return
    if name == "spacing" and geometry["padding"] in (0, "valid"):  # no kernel of the same extent in mm
        with pytest.raises(ValueError, match="conv=spacing"):
            build(name, dims, conv=plain, spacing_mm=(1.0, 9.0))
        return
    x = image(dims, size=5)
    shape = plain(x).shape
    module = build(name, dims, conv=plain)
    assert module(x).shape == shape
    geometry = {"stride": 1, "dilation": 1, "groups": 1, "padding_mode": "zeros", **geometry}
    if geometry["padding"] in ("same", "valid"):
        reach = [geometry["dilation"] * (k - 1) // 2 for k in dense_weight(name, module).shape[2:]]
        padding = reach if geometry["padding"] == "same" else [0] * dims
    elif name == "spacing":
        padding = module.padding
    else:
        padding = [geometry["padding"]] * dims
    expected = convolve(
        x.double().numpy(),
        dense_weight(name, module).double().numpy(),
        [geometry["stride"]] * dims,
        padding,
        [geometry["dilation"]] * dims,
        geometry["padding_mode"],
        geometry["groups"],
    )
    last = module if hasattr(module, "bias") else module[-1]
    if last.bias is not None:
        expected += last.bias.detach().double().numpy().reshape(-1, *[1] * dims)
    np.testing.assert_allclose(module(x).detach().numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_gradients_equal_finite_differences(name, dims):
    module = build(name, dims).double()
    x = image(dims, batch=1, size=2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: module(x), (x, *module.parameters()), fast_mode=True)


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_samples_of_a_batch_do_not_mix(name, dims):
    module, x = build(name, dims), image(dims, batch=3)
    torch.testing.assert_close(
        module(x), torch.cat([module(sample[None]) for sample in x]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_a_saved_state_dict_restores_the_output(name, dims, tmp_path):
    module, other, x = build(name, dims, 0), build(name, dims, 1), image(dims)
    assert not torch.allclose(module(x), other(x))
    torch.save(module.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    torch.testing.assert_close(module(x), other(x), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_a_deepcopy_shares_no_weights(name, dims):
    module, x = build(name, dims), image(dims)
    copy, before = deepcopy(module), module(x).detach().clone()
    torch.testing.assert_close(copy(x), before, rtol=0, atol=0)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(1)
    assert not torch.allclose(copy(x), before)
    torch.testing.assert_close(module(x), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "dims"), CASES)
def test_autocast_is_close_to_fp32_and_gradients_are_fp32(name, dims, dtype):
    module, x = build(name, dims), image(dims)
    expected = module(x)
    with torch.autocast("cpu", dtype):
        output = module(x)
    assert output.dtype == dtype
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(
        output.float(), expected, rtol=0, atol=(0.04 if dtype == torch.bfloat16 else 0.005) * scale
    )
    output.float().square().mean().backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all()
        for p in module.parameters()
    )


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_channels_last_input_gives_channels_last_output(name, dims):
    module, x, layout = build(name, dims), image(dims), LAYOUT[dims]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # with one thread small images take a slower path that loses the layout
    try:
        expected = module(x)
        assert expected.is_contiguous()
        module.to(memory_format=layout)
        output = module(x.contiguous(memory_format=layout))
    finally:
        torch.set_num_threads(threads)
    assert output.is_contiguous(memory_format=layout) and not output.is_contiguous()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    output.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_activation_checkpointing_gives_equal_gradients(name, dims):
    module, x = build(name, dims), image(dims).requires_grad_()
    inputs = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).square().sum(), inputs)
    checkpointed = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).square().sum(), inputs)
    for a, b in zip(checkpointed, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_folding_gives_torch_modules_with_equal_output(name, dims):
    module, x = build(name, dims), image(dims)
    expected, keys = module(x).detach(), set(module.state_dict())
    folded = fold_convs(module)
    torch.testing.assert_close(folded(x), expected, rtol=1e-5, atol=1e-5)
    assert not [type(m) for m in folded.modules() if type(m).__module__.startswith("medconv")]
    assert not any("parametrizations" in key for key in folded.state_dict())
    for layer in folded.modules():
        if isinstance(layer, (nn.Conv2d, nn.Conv3d)):
            assert type(layer) in (nn.Conv2d, nn.Conv3d)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=0)  # the original is unchanged
    assert set(module.state_dict()) == keys


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "acs"])
def test_a_folded_network_can_be_saved_and_traced(name):
    folded, image = fold_convs(nn.Sequential(build(name))), torch.randn(1, 4, 5, 5)
    buffer = io.BytesIO()
    torch.save(folded, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=False)  # written two lines above
    torch.testing.assert_close(saved(image), folded(image))
    torch.testing.assert_close(torch.jit.trace(folded, image)(image), folded(image))


@pytest.mark.parametrize("name", [*LAYERS, "mirror"])
def test_swap_and_fold_keep_training_flags_dtype_and_frozen_weights(name):
    dims = dims_of(name)[0] if name != "mirror" else 2
    conv, norm = (nn.Conv3d, nn.BatchNorm3d) if dims == 3 else (nn.Conv2d, nn.BatchNorm2d)
    network = (
        nn.Sequential(conv(1, 4, 3, padding=1), norm(4), nn.ReLU(), conv(4, 2, 3, padding=1)).double().eval()
    )
    network.requires_grad_(False)
    image = torch.randn(2, 1, *[6] * dims, dtype=torch.float64)
    if name == "mirror":
        swap_convs(network, Equivariant((0,)), example=image)
    else:
        swap_convs(
            network,
            LAYERS[name],
            **({"spacing_mm": (1.0,) * dims, "example": image} if name == "spacing" else {}),
        )
    folded = fold_convs(network)
    for module in (*network.modules(), *folded.modules()):
        assert not module.training
    frozen = [p.requires_grad for n, p in (*network.named_parameters(), *folded.named_parameters())]
    assert name in NOT_LINEAR or not any(frozen)
    assert all(p.dtype == torch.float64 for p in network.parameters())
    torch.testing.assert_close(folded(image), network(image))


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_compiles_as_one_graph(name, dims):
    module, x = build(name, dims), image(dims)
    expected = module(x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(expected.square().sum(), parameters)
    for a, b in zip(torch.autograd.grad(compiled(x).square().sum(), parameters), gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler"
)
@pytest.mark.parametrize("name", ["transform", "basis"])
def test_compiles_to_native_code(name):
    module, x = build(name), image(2)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, fullgraph=True)(x), module(x), rtol=1e-5, atol=1e-5)


class AllConvolutions(nn.Module):
    """All convolutions of two dimensions side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: build(name) for name in ALL if 2 in dims_of(name)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts.values()], 1)


def _gradients_of_half_a_batch(rank, folder):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    network = nn.parallel.DistributedDataParallel(AllConvolutions())
    x = image(2, batch=4)[rank * 2 : rank * 2 + 2]
    network(x).square().mean().backward()
    if rank == 0:
        torch.save({name: p.grad for name, p in network.module.named_parameters()}, f"{folder}/gradients.pt")
    del network  # its reducer must not outlive the group
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_give_the_gradient_of_one(tmp_path):
    ranks.call(_gradients_of_half_a_batch, str(tmp_path))
    network = AllConvolutions()
    network(image(2, batch=4)).square().mean().backward()
    gradients = torch.load(tmp_path / "gradients.pt", weights_only=True)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(
            gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
