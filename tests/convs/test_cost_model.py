"""medconv/convs/cost_model.py: operations, tiles, bytes and launches, and the seconds they add up to."""

import pytest
import torch

from medconv.convs import cost_model


def test_operations_are_multiply_adds():
    launch = cost_model.convolution(8, 16, (3, 3, 3), in_voxels=1000, out_voxels=500)
    assert launch.operations == 500 * 16 * 8 * 27
    assert launch.bytes == 2 * (8 * 1000 + 16 * 500 + 16 * 8 * 27)


@pytest.mark.parametrize(("into", "out", "groups", "tiled"), [(32, 16, 1, 512), (33, 17, 1, 48 * 32), (1, 1, 1, 256), (64, 32, 2, 2 * 512)])  # fmt: skip
def test_thin_layers_fill_whole_tiles(into, out, groups, tiled):
    launch = cost_model.convolution(into, out, (1, 1), 10, 10, groups, machine=cost_model.CPU_AMX)
    assert launch.tiled_operations == 10 * tiled
    assert launch.operations == 10 * into * out / groups


def test_seconds_are_the_slower_of_arithmetic_and_memory_and_a_start_each():
    machine = cost_model.Machine(1e9, 1e6, 0.5, (1, 1))
    busy, moving = cost_model.Launch(2e9, 2e9, 10.0), cost_model.Launch(5.0, 5.0, 3e6)
    assert machine.seconds([busy]) == pytest.approx(2.5)
    assert machine.seconds([moving]) == pytest.approx(3.5)
    assert machine.seconds([busy, moving]) == pytest.approx(6.0)
    assert machine.seconds([cost_model.Launch(2e9, 2e9, 10.0, passes=3)]) == pytest.approx(7.5)


def test_a_machine_is_chosen_by_the_precision_that_is_computed_in(monkeypatch):
    """Autocast counts, not the type of the image."""
    image = torch.zeros(1)
    assert cost_model.computed_in(image) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert cost_model.computed_in(image) == torch.bfloat16
    cpu = torch.device("cpu")
    assert cost_model.machine_of(cpu, torch.float32) is cost_model.CPU_FP32
    for has_amx, machine in ((True, cost_model.CPU_AMX), (False, cost_model.CPU_BF16)):
        monkeypatch.setattr(cost_model, "_HAS_AMX", has_amx)
        assert cost_model.machine_of(cpu, torch.bfloat16) is machine
    assert cost_model.machine_of(torch.device("cuda"), torch.float32) is cost_model.CUDA


def test_wider_elements_move_more_bytes():
    fp32, bf16 = (
        cost_model.convolution(8, 8, (3,), 10, 10, machine=machine)
        for machine in (cost_model.CPU_FP32, cost_model.CPU_BF16)
    )
    assert fp32.bytes == 2 * bf16.bytes and fp32.operations == bf16.operations
    prepared = cost_model.weight_preparation(10, 100, cost_model.CPU_BF16)
    assert prepared.tiled_operations == 200
