"""What every convolution of the family must hold, one test each over all of them."""

import os
import shutil
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import ranks
from helpers.conv_family import (
    ALL,
    CASES,
    CONV,
    FACTORISED,
    LAYERS,
    UNGROUPED,
    WEIGHT_PRIORS,
    build,
    dims_of,
    image,
)
from reference.convolution import convolve
from torch import nn
from torch.utils.checkpoint import checkpoint

from medconv.convs import fold_convs
from medconv.convs.factorised import product_weight
from medconv.convs.parametrization import rms

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


def dense(name: str, module: nn.Module) -> torch.Tensor:
    """The kernel that a linear member of the family amounts to."""
    return product_weight(module) if name in FACTORISED else module.weight.detach()


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: " ".join(f"{k}={v}" for k, v in g.items()))
@pytest.mark.parametrize("name", [n for n in LAYERS if n != "se"])
def test_every_geometry_of_the_library_gives_the_dense_convolution_or_a_clear_error(
    name: str, geometry: dict
) -> None:
    dims = dims_of(name)[0]
    plain = CONV[dims](4, 6, 3, **geometry)
    if geometry.get("groups") and name in UNGROUPED:
        with pytest.raises(ValueError, match=f"conv={name} needs groups=1, got 2"):
            build(name, dims, conv=plain)
        return
    if name == "spacing" and geometry["padding"] in (
        0,
        "valid",
    ):  # a thicker grid has no kernel of the same reach
        with pytest.raises(ValueError, match="conv=spacing"):
            build(name, dims, conv=plain, spacing_mm=(1.0, 9.0))
        return
    x = image(dims, size=5)
    shape = plain(x).shape
    module = build(name, dims, conv=plain)
    assert module(x).shape == shape
    geometry = {"stride": 1, "dilation": 1, "groups": 1, "padding_mode": "zeros", **geometry}
    if geometry["padding"] in ("same", "valid"):
        reach = [geometry["dilation"] * (k - 1) // 2 for k in dense(name, module).shape[2:]]
        padding = reach if geometry["padding"] == "same" else [0] * dims
    elif name == "spacing":
        padding = module.padding
    else:
        padding = [geometry["padding"]] * dims
    expected = convolve(
        x.double().numpy(),
        dense(name, module).double().numpy(),
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


def test_squeeze_and_excitation_weighs_channels_by_the_whole_image() -> None:
    module = build("se", 2)
    x = image(2)
    features = module[0](x).detach().double().numpy()
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in module[1].parameters())
    for sample, output in zip(features, module(x).detach().numpy(), strict=True):
        hidden = np.maximum(w1[:, :, 0, 0] @ sample.mean((1, 2)) + b1, 0)
        gate = 1 / (1 + np.exp(-(w2[:, :, 0, 0] @ hidden + b2)))
        np.testing.assert_allclose(output, sample * gate[:, None, None], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_gradients_are_those_of_finite_differences(name: str, dims: int) -> None:
    module = build(name, dims).double()
    x = image(dims, batch=1, size=2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: module(x), (x, *module.parameters()), fast_mode=True)


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_samples_of_a_batch_do_not_mix(name: str, dims: int) -> None:
    module, x = build(name, dims), image(dims, batch=3)
    torch.testing.assert_close(
        module(x), torch.cat([module(sample[None]) for sample in x]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_state_dict_round_trip(name: str, dims: int, tmp_path: Path) -> None:
    module, other, x = build(name, dims, 0), build(name, dims, 1), image(dims)
    assert not torch.allclose(module(x), other(x))
    torch.save(module.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    torch.testing.assert_close(module(x), other(x), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_deepcopy_has_weights_of_its_own(name: str, dims: int) -> None:
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
def test_autocast(name: str, dims: int, dtype: torch.dtype) -> None:
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
def test_channels_last_in_gives_channels_last_out(name: str, dims: int) -> None:
    module, x, layout = build(name, dims), image(dims), LAYOUT[dims]
    threads = torch.get_num_threads()
    torch.set_num_threads(
        2
    )  # with one thread torch leaves its fast route, which keeps layouts, for small images
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
def test_activation_checkpointing_gives_equal_gradients(name: str, dims: int) -> None:
    module, x = build(name, dims), image(dims).requires_grad_()
    inputs = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).square().sum(), inputs)
    again = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).square().sum(), inputs)
    for a, b in zip(again, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_fold_gives_torch_modules_of_equal_output(name: str, dims: int) -> None:
    module, x = build(name, dims), image(dims)
    expected, keys = module(x).detach(), set(module.state_dict())
    folded = fold_convs(module)
    torch.testing.assert_close(folded(x), expected, rtol=1e-5, atol=1e-5)
    assert not [type(m) for m in folded.modules() if type(m).__module__.startswith("medconv")]
    assert not any("parametrizations" in key for key in folded.state_dict())
    for layer in folded.modules():
        if isinstance(layer, (nn.Conv2d, nn.Conv3d)):
            assert type(layer) in (nn.Conv2d, nn.Conv3d)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=0)  # the original is what it was
    assert set(module.state_dict()) == keys


@pytest.mark.parametrize(("name", "dims"), [(n, d) for n in WEIGHT_PRIORS + FACTORISED for d in dims_of(n)])
def test_kernel_has_the_variance_of_the_one_it_replaces(name: str, dims: int) -> None:
    conv = CONV[dims](16, 24, 3, padding=1)
    with torch.no_grad():
        conv.weight.normal_(std=0.37, generator=torch.Generator().manual_seed(1))
    fan = conv.weight[0].numel()
    power = rms(conv.weight) ** 2 * fan
    module = build(name, dims, conv=conv)
    weight = dense(name, module)
    # Equal per weight; `spacing` has another number of taps, and keeps the variance of the output.
    assert rms(weight) ** 2 * weight[0].numel() == pytest.approx(power, rel=1e-4)
    assert abs(float(weight.double().mean())) < 0.1 * 0.37


@pytest.mark.parametrize(("name", "dims"), [(n, d) for n in WEIGHT_PRIORS + FACTORISED for d in dims_of(n)])
def test_a_new_weight_is_drawn_unless_the_old_one_is_kept(name: str, dims: int) -> None:
    conv = CONV[dims](4, 6, 3, padding=1)
    first, second = (build(name, dims, seed, deepcopy(conv)) for seed in (0, 1))
    assert not torch.allclose(dense(name, first), dense(name, second))
    first, second = (build(name, dims, seed, deepcopy(conv), init_from_weights=True) for seed in (0, 1))
    torch.testing.assert_close(dense(name, first), dense(name, second))


@pytest.mark.parametrize(
    ("name", "dims"), [(n, d) for n in WEIGHT_PRIORS + FACTORISED for d in dims_of(n) if n != "spacing"]
)
def test_a_kept_weight_that_lies_in_the_prior_comes_back(name: str, dims: int) -> None:
    made = dense(name, build(name, dims)).float()
    conv = CONV[dims](4, 6, 3, padding=1)
    with torch.no_grad():
        conv.weight.copy_(made)
    module = build(name, dims, conv=conv, init_from_weights=True)
    torch.testing.assert_close(dense(name, module).float(), made, rtol=1e-4, atol=1e-5)
    assert module.approximation_error < 1e-5


@pytest.mark.parametrize(
    ("name", "dims"), [(n, d) for n in WEIGHT_PRIORS for d in dims_of(n) if n not in ("spacing", "masked")]
)
def test_a_kept_weight_is_the_nearest_of_the_prior(name: str, dims: int) -> None:
    """The error is at a right angle to every direction that the parameters can take."""
    conv = CONV[dims](4, 6, 3, padding=1)
    wanted = conv.weight.detach().double()
    module = build(name, dims, conv=conv, init_from_weights=True).double()
    error = module.weight - wanted
    relative = float(error.detach().norm() / wanted.norm())
    assert 0.05 < relative < 1 and module.approximation_error == pytest.approx(relative, rel=1e-4)
    original = module.parametrizations.weight.original
    (slope,) = torch.autograd.grad(error.square().sum(), original)
    assert float(slope.abs().max()) < 1e-5


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_compiles_as_one_graph(name: str, dims: int) -> None:
    module, x = build(name, dims), image(dims)
    expected = module(x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    parameters = list(module.parameters())
    wanted = torch.autograd.grad(expected.square().sum(), parameters)
    for a, b in zip(torch.autograd.grad(compiled(x).square().sum(), parameters), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler"
)
@pytest.mark.parametrize("name", ["transform", "basis"])
def test_compiles_to_native_code(name: str) -> None:
    module, x = build(name), image(2)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, fullgraph=True)(x), module(x), rtol=1e-5, atol=1e-5)


class Everything(nn.Module):
    """All convolutions of two dimensions side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: build(name) for name in ALL if 2 in dims_of(name)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts.values()], 1)


def _one_of_two(rank: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    network = nn.parallel.DistributedDataParallel(Everything())
    x = image(2, batch=4)[rank * 2 : rank * 2 + 2]
    network(x).square().mean().backward()
    if rank == 0:
        torch.save({name: p.grad for name, p in network.module.named_parameters()}, f"{folder}/gradients.pt")
    del network  # its reducer must not outlive the group
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_give_the_gradient_of_one(tmp_path: Path) -> None:
    ranks.call(_one_of_two, str(tmp_path))
    network = Everything()
    network(image(2, batch=4)).square().mean().backward()
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
