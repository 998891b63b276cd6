"""scripts/gpu_checks/limits.py, wide.py and networks.py: counts by hand, and sizes that are planned."""

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny
from torch import nn

from gpu_checks import claims, data
from gpu_checks.limits import H100, peaks_of, step_seconds, step_work
from gpu_checks.networks import LARGE_PATCHES, LARGE_PHANTOM, PHANTOM, Size
from gpu_checks.setting import Setting
from gpu_checks.wide import wide_conv3d
from medconv import config
from medconv.data.preprocessing.dataset_cache import cached_fingerprint
from medconv.training.data_setup import find_data
from medconv.training.plan_setup import make_plan


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


LAST = torch.channels_last_3d


@pytest.mark.parametrize("width", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_the_plain_convolution(width):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 6, 8, dtype=torch.float64).to(memory_format=LAST)
    weight = torch.randn(4, 3, 3, 3, 3, dtype=torch.float64)
    grad = torch.randn(2, 4, 5, 6, 8, dtype=torch.float64)
    outputs = []
    for conv in (lambda a, b: F.conv3d(a, b, padding=1), lambda a, b: wide_conv3d(a, b, width)):
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        y = conv(*leaves)
        outputs.append([y.detach(), *torch.autograd.grad(y, leaves, grad)])
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    assert outputs[1][0].is_contiguous(memory_format=LAST)


ON_GPU = ("trainer.accelerator=cpu", "trainer.precision=bf16-mixed", "plan.memory_gb=24")


def planned(folder, *words):
    """On a large GPU. Returns: also the number of classes."""
    setting = Setting("cuda", False, folder, folder / "shared", limit_s=60)
    settings = config.validate(tiny.composed(*setting.overrides("run", *words), *ON_GPU))
    dataset = find_data(settings.data)
    measured, _ = cached_fingerprint(dataset, folder / "prepared")
    return make_plan(settings, dataset, measured), dataset.targets.num_outputs


def size_of(plan, classes):
    assert set(plan.strides) == {(2, 2, 2)} and set(plan.kernel_sizes) == {
        (3, 3, 3)
    }  # as `Size.unet` has them
    return Size(plan.patch_size, len(plan.normalisation), classes, plan.batch_size, plan.channels)


@pytest.mark.slow  # as the checks themselves
def test_the_phantoms_are_planned_like_this(tmp_path):
    assert size_of(*planned(tmp_path)) == PHANTOM
    assert size_of(*planned(tmp_path, *LARGE_PATCHES)) == LARGE_PHANTOM


@pytest.mark.slow  # as the checks themselves
def test_whole_images_are_planned_like_this(tmp_path):
    file = data._medmnist(tmp_path / "squares.npz", 400)
    plan, classes = planned(tmp_path, "data=medmnist", f"data.root={file}")
    assert classes == 2 and (plan.batch_size, 1, *plan.patch_size) == data._PICTURES
    assert {key: getattr(plan, key) for key in data.PLANNED} == data.PLANNED
    assert set(plan.kernel_sizes) == {(3, 3)}
