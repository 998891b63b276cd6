"""medconv/models/layers/triton_norm.py: by Triton's interpreter, equal to torch's norms."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import interpreted_norms

from medconv.models.layers.fast_norm import uses_triton
from medconv.models.layers.triton_norm import BatchStatistics

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
