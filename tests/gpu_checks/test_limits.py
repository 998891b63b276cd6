"""scripts/gpu_checks/limits.py: bytes and operations of steps, against counts by hand."""

import pytest
from torch import nn

from gpu_checks.limits import H100, newton_schulz_seconds, peaks_of, step_seconds, step_work
from gpu_checks.networks import NVIDIA


def test_a_convolution_counts_forward_and_both_gradients() -> None:
    work = step_work(
        lambda: nn.Sequential(nn.Conv3d(4, 8, 1), nn.Conv3d(8, 8, 3, padding=1)), (2, 4, 6, 6, 6)
    )
    places, second = 2 * 6**3, 2 * 2 * 6**3 * 8 * 8 * 27
    operations = [operations for _, operations in work]
    # the first layer's image needs no gradient
    assert sorted(operations) == sorted([2 * places * 4 * 8] * 2 + [second, 2 * second])
    forward = 2 * (places * (8 + 8) + 8 * 8 * 27 + 8)  # bytes in bf16
    assert any(moved == forward for moved, _ in work)


def test_a_prediction_counts_the_forward_pass_alone() -> None:
    (work,) = step_work(lambda: nn.Conv3d(4, 8, 1), (1, 4, 6, 6, 6), backward=False)
    assert work == (2 * (6**3 * (4 + 8) + 4 * 8 + 8), 2 * 6**3 * 4 * 8)


def test_the_limit_is_the_slower_of_bytes_and_operations() -> None:
    assert H100.seconds(moved=3.35e12) == 1 and H100.seconds(moved=1.0, operations=989e12) == 1
    assert step_seconds(H100, [(3.35e12, 0.0), (0.0, 989e12)]) == 2
    assert peaks_of("NVIDIA H200").name == "H200" and peaks_of("x86_64") is H100


def test_newton_schulz_is_three_products_in_each_of_five_repetitions() -> None:
    operations = 5 * (2 * 4 * 4 * 10 + 2 * 4**3 + 2 * 4 * 4 * 10)
    for shape in ((4, 10), (10, 4)):
        assert newton_schulz_seconds(H100, [shape]) == pytest.approx(operations / H100.bf16)


def test_the_goal_at_nvidias_size_is_below_the_limit() -> None:
    assert NVIDIA.batch / NVIDIA.limit_seconds(H100) > 100
    assert NVIDIA.operations / H100.bf16 < NVIDIA.limit_seconds(H100)
