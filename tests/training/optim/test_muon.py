"""medconv/training/optim/muon.py: its steps, and Newton-Schulz."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.networks import step, unet
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from medconv.convs import basis, swap_convs
from medconv.models.unet import UNet
from medconv.training.optim import lr_schedulers, muon
from medconv.training.optim.muon import Muon, length_factor, orthogonal
from medconv.utils import checkpoint_io


def test_a_step_follows_the_definition():
    """Kernel: decay, then 0.2 sqrt(larger side) lr along the orthogonalised Nesterov momentum; vector: Adam."""
    torch.manual_seed(0)
    kernel, bias = nn.Parameter(torch.randn(4, 3, 3, 3, 3)), nn.Parameter(torch.randn(4))
    adam = nn.Parameter(bias.detach().clone())
    optimizer = Muon([kernel, bias], lr=0.1, momentum=0.9, weight_decay=0.5)
    other = torch.optim.Adam([adam], lr=0.1)
    momentum = torch.zeros_like(kernel)
    for _ in range(3):
        before, gradient, slope = kernel.detach().clone(), torch.randn_like(kernel), torch.randn(4)
        kernel.grad, bias.grad, adam.grad = gradient.clone(), slope, slope.clone()
        optimizer.step()
        other.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        ahead = (0.1 * gradient + 0.9 * momentum).reshape(4, 81)
        expected = before * (1 - 0.1 * 0.5) - 0.1 * 0.2 * 9 * orthogonal([ahead])[0].reshape(before.shape)
        torch.testing.assert_close(kernel.detach(), expected)
        torch.testing.assert_close(bias.detach(), adam.detach())


def test_the_memory_format_changes_nothing():
    torch.manual_seed(0)
    plain = nn.Conv3d(3, 5, 3)
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last_3d)
    for layer in (plain, last):
        optimizer = Muon(layer.parameters(), lr=0.1)
        x = torch.ones(1, 3, 5, 5, 5) * torch.arange(5.0)
        (layer(x) ** 2).sum().backward()
        optimizer.step()
    assert last.weight.is_contiguous(memory_format=torch.channels_last_3d)
    # bf16 products are summed in another order
    torch.testing.assert_close(plain.weight, last.weight, atol=2e-3, rtol=0.02)


def test_a_loaded_state_continues_exactly():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    second = copy.deepcopy(first)
    optimizers = [Muon(first.parameters(), lr=0.1), Muon(second.parameters(), lr=0.1)]

    def step(network, optimizer):
        optimizer.zero_grad()
        network(torch.linspace(0, 1, 200).reshape(2, 2, 10, 5)).square().mean().backward()
        optimizer.step()

    step(first, optimizers[0])
    second.load_state_dict(first.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for network, optimizer in zip((first, second), optimizers, strict=True):
        step(network, optimizer)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_muon_trains_basis_convolutions():
    network = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 1, 3, padding=1))
    swap_convs(network, basis)
    torch.manual_seed(0)
    x, target = torch.randn(2, 1, 8, 8, 8), torch.zeros(2, 1, 8, 8, 8)
    optimizer = Muon(network.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (network(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(
    "wrong", [{"lr": -1}, {"momentum": 1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": float("nan")}]
)
def test_values_out_of_range_are_errors(wrong):
    with pytest.raises(ValueError, match=r"(lr|momentum|betas\[1\]|weight_decay) must .*, got "):
        Muon([nn.Parameter(torch.zeros(2, 2, 3, 3))], **wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lr": "fast"}, "lr must be a number, got fast"),
        ({"betas": [0.9]}, r"betas must be two numbers, got \[0\.9\]"),
    ],
)
def test_values_of_another_type_are_errors(wrong, words):
    with pytest.raises(ValueError, match=words):
        Muon([nn.Parameter(torch.zeros(2, 2, 3, 3))], **wrong)


def test_a_run_with_muon_learns(tmp_path):
    dataset = tiny.write_dataset(tmp_path / "dataset")
    summary = tiny.train(dataset, tmp_path / "run", "optimizer=muon", "trainer.max_steps=12")
    losses = tiny.losses(tmp_path / "run")
    assert summary["status"] == "done" and losses[-1] < losses[0]
    content = checkpoint_io.read(tmp_path / "run/checkpoints/last.ckpt")
    assert any("momentum" in state for state in content["optimizer_states"][0]["state"].values())


@pytest.mark.slow
def test_fsdp_gives_the_losses_of_ddp(tmp_path):
    dataset = tiny.write_dataset(tmp_path / "dataset")
    losses = []
    for strategy in ("ddp", "fsdp"):
        settings = [
            "optimizer=muon",
            "model.norm=instance",
            f"trainer.strategy={strategy}",
            "trainer.devices=2",
        ]
        arguments = tiny.overrides(dataset, *settings, f"run.dir={tmp_path / strategy}")
        done = tiny.command("train.py", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(tiny.losses(tmp_path / strategy))
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], abs=2e-3)


def test_parameter_groups_do_not_change_a_step():
    """Each group is split into kernels and vectors."""
    one, other = unet("instance"), unet("instance")
    plain = Muon(one.parameters(), lr=0.1)
    grouped = Muon(
        [
            {"params": other.encoder.parameters()},
            {"params": [p for n, p in other.named_parameters() if "encoder" not in n]},
        ],
        lr=0.1,
    )
    assert [group["kernels"] for group in grouped.param_groups] == [True, False, True, False]
    for network, optimizer in ((one, plain), (other, grouped)):
        torch.manual_seed(1)
        step(network, optimizer)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_without_a_learning_rate_the_length_of_the_run_sets_it():
    """A square root beyond 600 steps, a quarter at the least; a rate that is set stays."""
    assert [length_factor(n) for n in (1, 600, 2400, 9600, math.inf)] == [1, 1, 0.5, 0.25, 0.25]
    kernel = nn.Parameter(torch.ones(2, 2, 3, 3))
    for lr, expected in ((None, 0.01), (0.3, 0.3)):
        optimizer = Muon([kernel], lr)
        schedule = lr_schedulers.constant(optimizer)
        schedule.set_length(2400)
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        schedule.move_end(150)
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3 if lr else 0.02)


class Launches(TorchDispatchMode):
    """Counts operations that a GPU would launch a kernel for; a fused one counts once."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = function.is_view or "view" in function.__name__
        is_kernel = not is_view and "empty" not in function.__name__
        self.count += is_kernel and function.namespace == "aten"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("features", "ceiling"), [((32, 64, 128, 256), 190), ((32, 64, 128, 256, 320, 320), 230)]
)
def test_a_step_on_a_gpu_launches_few_kernels(features, ceiling, monkeypatch):
    """Of meta tensors, in the precision of a GPU. Kernels of one shape are multiplied at once."""
    monkeypatch.setattr(muon, "fast_bf16_cpu", lambda: True)
    monkeypatch.setattr(muon, "_SMALLEST_BF16", 1)
    counts = {}
    for has_guard in (False, True):
        counts[has_guard] = launches_of_a_step(features, has_guard)
    assert 0.8 * ceiling < counts[True] <= ceiling
    # found_inf on the device costs a few launches, not some for each kernel
    assert counts[True] - counts[False] <= 20


def launches_of_a_step(features, has_guard):
    with torch.device("meta"):
        network = UNet(3, 1, 3, features, [2] * (len(features) - 1), norm="batch")
    parameters = list(network.parameters())
    optimizer = Muon(parameters, lr=0.1)
    if has_guard:
        optimizer.found_inf = torch.empty((), device="meta")
    for launches in (Launches(), Launches()):  # the first step makes the states
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        with launches:
            optimizer.step()
    return launches.count


def test_either_chooses_between_lists_of_tensors_and_keeps_their_formats():
    first = [torch.randn(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d), torch.randn(5, 2, 3, 3)]
    second = [torch.full_like(tensor, math.nan) for tensor in first]
    for condition, expected in ((True, first), (False, second)):
        chosen = muon._either(torch.tensor(condition), first, second)
        torch.testing.assert_close(chosen, expected, rtol=0, atol=0, equal_nan=True)
        assert [tensor.stride() for tensor in chosen] == [tensor.stride() for tensor in first]


def by_definition(matrix):
    """The definition: five steps on the matrix itself."""
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-3), (True, 0.1)])
def test_orthogonal_is_newton_schulz_of_each_matrix(bf16, tolerance, monkeypatch):
    """Also of singular values over four decades, as momenta have them; the update's size is kept."""
    monkeypatch.setattr(muon, "fast_bf16_cpu", lambda: bf16)
    generator = torch.Generator().manual_seed(0)
    matrices = []
    for shape, decades in [((128, 500), 0), ((128, 1728), 2), ((128, 900), 4), ((600, 128), 3)]:
        u, _, v = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
        matrices.append(1e-3 * u * 10 ** -torch.linspace(0, decades, 128) @ v)
    before = torch.get_float32_matmul_precision()
    for result, matrix in zip(orthogonal(matrices), matrices, strict=True):
        expected = by_definition(matrix)
        assert (result.double() - expected).norm() < tolerance * expected.norm()
        assert result.double().norm() == pytest.approx(float(expected.norm()), rel=0.01)
    assert torch.get_float32_matmul_precision() == before


def test_orthogonal_ignores_the_scale():
    matrix = torch.randn(6, 40)
    torch.testing.assert_close(orthogonal([1e4 * matrix]), orthogonal([matrix]), atol=0.02, rtol=0.05)
    assert orthogonal([torch.zeros(3, 9)])[0].abs().max() == 0


@pytest.mark.parametrize("bf16", [False, True])
def test_batches_and_rows_of_zeros_change_rounding_alone(bf16, monkeypatch):
    """Two of one shape, a tall one, one with fewer rows, a square."""
    monkeypatch.setattr(muon, "fast_bf16_cpu", lambda: bf16)
    monkeypatch.setattr(muon, "_SMALLEST_BF16", 1)
    generator = torch.Generator().manual_seed(0)
    shapes = [(32, 90), (27, 32), (32, 90), (90, 32), (3, 9), (32, 32)]
    matrices = [torch.randn(shape, generator=generator) for shape in shapes]
    together = orthogonal(matrices, batched=True)
    for result, other, matrix in zip(together, orthogonal(matrices), matrices, strict=True):
        (alone,) = orthogonal([matrix])
        tolerance = 0.02 if bf16 else 1e-4
        assert result.shape == matrix.shape
        assert (result - alone).norm() < tolerance * alone.norm()
        assert (other - alone).norm() < tolerance * alone.norm()
