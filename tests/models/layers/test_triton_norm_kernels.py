"""medconv/models/layers/triton_norm_kernels.py: built for an A100 and an H100, without one.

What the kernels compute is tested by the interpreter, in `test_triton_norm.py`.
"""

from functools import partial
from importlib.util import find_spec
from math import prod

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from helpers.gpu_builds import MULTIPROCESSORS, builds

from medconv.convs.parametrization import CHANNELS_LAST
from medconv.models.layers import triton_norm_launch

KERNELS = ["moments", "merge", "normalise", "affine_gradients", "input_gradient"]
# Stages of the planned networks, channels that 16 does not divide, 2D; and norms as MONAI's networks have.
SHAPES = [(4, 32, 128, 128, 128), (4, 320, 8, 8, 8), (8, 32, 512, 512)]
BY_NIGHT = [(4, 64, 64, 64, 64), (2, 24, 48, 48, 48)]


def step(shape, dtype, over_batch=True, slope=0.01, has_affine=True, are_given=False, groups=0):
    """Launches forward and backward; of tensors on the CPU, of which the kernels see pointers alone."""

    def run():
        # memory that is never touched
        x = torch.empty(shape, dtype=dtype, device="meta")
        x = torch.empty_strided(shape, x.to(memory_format=CHANNELS_LAST[len(shape)]).stride(), dtype=dtype)
        affine = torch.empty(2, shape[1]).unbind() if has_affine else (None, None)
        given = (torch.empty(shape[1]), torch.empty(shape[1])) if are_given else None
        y, mean, variance = triton_norm_launch.forward(x, *affine, given, 1e-5, slope, over_batch, groups)
        statistics = (mean, variance)
        triton_norm_launch.backward(y, x, *statistics, *affine, 1e-5, slope, over_batch, groups, are_given)

    return run


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        yield


def check(found, is_double=False):
    for build in found:
        assert build.spilled <= 16, build
        assert is_double or build.registers <= 128, build


@pytest.mark.parametrize(
    ("shape", "dtype", "arch"),
    [
        *((shape, torch.bfloat16, 90) for shape in SHAPES),
        (SHAPES[0], torch.bfloat16, 80),
        *(pytest.param(shape, torch.bfloat16, 90, marks=pytest.mark.slow) for shape in BY_NIGHT),
    ],
    ids=str,
)
def test_kernels_of_planned_networks_fit_into_registers_and_one_wave(
    shape, dtype, arch, tmp_path, monkeypatch
):
    monkeypatch.setattr(triton_norm_launch, "multiprocessors", lambda device: MULTIPROCESSORS[arch])
    programs_of = {"moments": 7, "affine_gradients": 5}
    found = builds(step(shape, dtype), arch, tmp_path)
    assert [build.kernel for build in found] == KERNELS
    check(found)
    for build in found:
        if build.kernel in ("moments", "merge", "affine_gradients"):
            assert prod(build.grid) <= build.resident, build
        if shape == SHAPES[0] and build.kernel in ("moments", "affine_gradients"):
            # Nor does a multiprocessor have much less to do than another
            assert prod(build.grid) >= 0.95 * programs_of[build.kernel] * MULTIPROCESSORS[arch], build
        # 16 bytes at once, as 8 divides the channels
        assert build.kernel == "merge" or build.loads == 16, build


VARIANTS = {
    "float16": partial(step, SHAPES[0], torch.float16),
    "instance norm": partial(step, SHAPES[0], torch.bfloat16, over_batch=False),
    "group norm": partial(step, SHAPES[0], torch.bfloat16, over_batch=False, groups=8),
    "no activation": partial(step, SHAPES[0], torch.bfloat16, slope=None),
    "no weight and bias": partial(step, SHAPES[0], torch.bfloat16, has_affine=False),
    "running statistics": partial(step, SHAPES[0], torch.bfloat16, are_given=True),
    "one channel": partial(step, (2, 1, 48, 48, 48), torch.bfloat16),
    "odd channels": partial(step, (2, 33, 48, 48, 48), torch.bfloat16),
    "one chunk": partial(step, (1, 32, 4, 4, 4), torch.bfloat16),  # one tile a program, too
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_fits_into_registers(name, tmp_path):
    check(builds(VARIANTS[name](), 80, tmp_path))


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_double_precision_spills_nothing(arch, tmp_path):
    check(builds(step(BY_NIGHT[0], torch.float64), arch, tmp_path), is_double=True)
