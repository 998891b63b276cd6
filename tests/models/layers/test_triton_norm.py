"""medconv/models/layers/triton_norm.py and triton_norm_launch.py, by the interpreter."""

from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import interpreted_norms

from medconv.models.layers.fast_norm import uses_triton
from medconv.models.layers.triton_norm import BatchStatistics
from medconv.models.layers.triton_norm_launch import (
    _A100_MULTIPROCESSORS,
    _GRADIENT_PROGRAMS,
    _MAX_CHUNKS,
    _MOMENT_PROGRAMS,
    Plan,
    multiprocessors,
)

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_kernels_layers_networks_and_operators_behave_as_torchs(tmp_path: Path) -> None:
    checks = [
        "outputs_and_gradients_equal_torchs",
        "layers_track_statistics_as_torchs",
        "half_precision_layers_work",
        "single_values_are_an_error",
        "networks_train_as_torchs",
        "networks_with_group_norms_stay_in_channels_last",
        "operators_are_sound",
    ]
    interpreted_norms.run(checks, tmp_path)


def test_a_cpu_without_the_interpreter_does_not_use_it():
    assert not uses_triton(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))


def test_statistics_of_a_batch_move_the_running_ones_by_the_momentum():
    running = BatchStatistics(torch.zeros(2), torch.ones(2), momentum=0.25)
    running.update(torch.tensor([[4.0, 8.0]]), torch.tensor([[3.0, 6.0]]), count=4)
    assert running.running_mean.tolist() == [1, 2] and running.running_var.tolist() == [1.75, 2.75]
    assert running.without_update() == BatchStatistics()


def test_running_statistics_in_place_of_the_batchs_are_needed_again():
    fixed = BatchStatistics(torch.zeros(2), torch.ones(2), training=False)
    assert fixed.without_update() is fixed


if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


SHAPES = [(1, 1, 513, 517), (2, 5, 7, 9), (12, 33, 255, 257), (4, 32, 128, 128, 128), (4, 320, 4, 4, 4)]


@pytest.mark.parametrize("programs", [_MOMENT_PROGRAMS, _GRADIENT_PROGRAMS])
@pytest.mark.parametrize("over_batch", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_cover_all_voxels_and_none_is_empty(shape, over_batch, programs):
    plan = Plan(torch.empty(shape, device="meta"), over_batch, programs)
    assert plan.samples * plan.voxels * plan.channels == prod(shape)
    assert plan.samples == (1 if over_batch else shape[0])
    length = plan.steps * plan.rows
    assert (plan.chunks - 1) * length < plan.voxels <= plan.chunks * length
    assert 1 <= plan.chunks <= _MAX_CHUNKS
    assert plan.chunk_grid[1] * plan.tile["COLS"] >= plan.channels
    assert plan.chunks == 1 or prod(plan.chunk_grid) <= programs * _A100_MULTIPROCESSORS


def test_a_large_image_fills_the_gpu_in_both_norms():
    x = torch.empty(4, 32, 128, 128, 128, device="meta")
    for over_batch in (True, False):
        assert prod(Plan(x, over_batch).chunk_grid) > 0.9 * _MOMENT_PROGRAMS * _A100_MULTIPROCESSORS


def test_a_larger_gpu_has_more_programs(monkeypatch):
    """An H100 has 132 multiprocessors, which 540 programs, enough for an A100, would not keep busy alike."""
    h100 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h100)
    assert multiprocessors(torch.device("cuda", 0)) == 132
    assert multiprocessors(torch.device("cpu")) == _A100_MULTIPROCESSORS


@pytest.mark.parametrize(("channels", "align"), [(1, 1), (33, 1), (20, 4), (24, 8), (32, 16), (320, 16)])
def test_the_kernels_learn_what_divides_the_channels(channels, align):
    assert Plan(torch.empty(2, channels, 4, 4, device="meta"), True).tile["ALIGN"] == align
