"""scripts/gpu_checks/limits.py: bytes and operations of steps, against counts by hand."""

import pytest
from torch import nn

from gpu_checks import claims
from gpu_checks.limits import H100, peaks_of, step_seconds, step_work


def test_a_convolution_counts_forward_and_both_gradients():
    work = step_work(
        lambda: nn.Sequential(nn.Conv3d(4, 8, 1), nn.Conv3d(8, 8, 3, padding=1)), (2, 4, 6, 6, 6)
    )
    places, second = 2 * 6**3, 2 * 2 * 6**3 * 8 * 8 * 27
    operations = [operations for _, operations in work]
    # the first layer's image needs no gradient
    assert sorted(operations) == sorted([2 * places * 4 * 8] * 2 + [second, 2 * second])
    forward = 2 * (places * (8 + 8) + 8 * 8 * 27 + 8)  # bytes in bf16
    assert any(moved == forward for moved, _ in work)


def test_a_batch_norm_counts_three_passes_forward_and_five_backward():
    work = step_work(lambda: nn.Sequential(nn.Conv3d(4, 8, 1), nn.BatchNorm3d(8)), (2, 4, 6, 6, 6))
    one_pass = 2 * 2 * 8 * 6**3  # bytes in bf16
    assert [moved for moved, operations in work if operations == 0] == [3 * one_pass, 5 * one_pass]


def test_the_limit_is_the_slower_of_bytes_and_operations():
    assert H100.seconds(moved=3.35e12) == 1 and H100.seconds(moved=1.0, operations=989e12) == 1
    assert step_seconds(H100, [(3.35e12, 0.0), (0.0, 989e12)]) == 2
    assert peaks_of("NVIDIA H200").name == "H200" and peaks_of("x86_64") is H100


@pytest.mark.parametrize(
    ("part", "limit"),
    [
        # 2 x 32 x 120 x 168 x 120 numbers of two bytes, touched 8 and 6 times, over 3.35 TB/s
        ("norm-price", 154_828_800 * 2 * 8 / 3.35e12),
        ("depthwise-price", 154_828_800 * 2 * 6 / 3.35e12),
        # 128 x 128 x 128 numbers of four bytes, 1.3 times as many read and each written
        ("augmentation-speed", 2_097_152 * 4 * 2.3 / 3.35e12),
        ("loader", 64e9 / (884_736 * 3)),  # 96 x 96 x 96 voxels of two bytes and a byte, over 64 GB/s
    ],
)
def test_limits_of_an_h100_by_hand(part, limit):
    found = {
        expect.limit(H100)
        for group in claims.GROUPS
        for claim in claims.of_group(group)
        for expect in claim.expects
        if claim.name == part and expect.limit is not None
    }
    assert list(found) == [pytest.approx(limit)]
