"""Windows over full images: weights, flips, and memory."""

import pytest
import torch
from monai.networks.nets import DynUNet
from torch import Tensor

from medconv.data.augmentation.augment import swapped_channels
from medconv.inference.sliding_window import (
    EVEN_DISTANCE,
    FIXED_DISTANCE,
    SlidingWindow,
    Window,
    _WindowLogits,
    slab_axis,
    usable_axes,
)
from medconv.models.unet import UNet
from medconv.utils.errors import ArgumentError


class Constant:
    """Logits 3 and -2 everywhere; records the shapes of its windows."""

    def __init__(self) -> None:
        self.shapes = []

    def __call__(self, windows: Tensor) -> Tensor:
        self.shapes.append(tuple(windows.shape))
        logits = windows.new_empty(len(windows), 2, *windows.shape[2:])
        logits[:, 0], logits[:, 1] = 3.0, -2.0
        return logits


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.9])
@pytest.mark.parametrize(("size", "patch"), [((13, 10), (8, 8)), ((13, 9, 7), (6, 4, 4)), ((8, 8), (8, 8))])
def test_every_voxel_keeps_its_place(size, patch, overlap):
    shapes = []

    def network(windows):
        shapes.append(windows.shape)
        return windows.clone()

    image = torch.randn(1, 2, *size)
    logits = SlidingWindow(patch, overlap, batch_size=3)(network, image)
    torch.testing.assert_close(logits, image, rtol=1e-4, atol=1e-5)
    assert {shape[1:] for shape in shapes} == {(2, *patch)}
    assert max(shape[0] for shape in shapes) <= 3


@pytest.mark.parametrize("placement", [FIXED_DISTANCE, EVEN_DISTANCE])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_windows_of_one_voxel_are_run_once(placement, axis):
    """Whichever axis the planes lie along."""
    network = Constant()
    window = SlidingWindow((4, 4, 1), 0.5, placement=placement)
    stream = window.stream(network, torch.randn(1, 4, 4, 9), axis)
    assert bool(stream.take(0, stream.length).isfinite().all())
    assert sum(shape[0] for shape in network.shapes) == 9


def test_deep_supervision_heads_are_left_out():
    image = torch.randn(1, 1, 12, 9)
    both = SlidingWindow((8, 8))(lambda windows: [windows.clone(), windows[..., ::2, ::2]], image)
    torch.testing.assert_close(both, image, rtol=1e-4, atol=1e-5)
    network = DynUNet(2, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 6, 8], deep_supervision=True).eval()
    assert SlidingWindow((8, 8))(network, image).shape == (1, 2, 12, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overlap": 1.0}, r"^overlap must be at least 0 and below 1.*got 1\.0"),
        ({"overlap": -0.1}, r"^overlap must be at least 0 and below 1.*got -0\.1"),
        ({"batch_size": 0}, r"^sw_batch_size must be a whole number of at least 1, got 0"),
    ],
)
def test_errors_name_the_argument_and_its_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        SlidingWindow((8, 8), **arguments)


def test_mirror_augmentation_is_the_mean_over_all_flips():
    torch.manual_seed(0)
    network, image = UNet(3, 1, 2, (4, 6), (2,)).eval(), torch.randn(1, 1, 8, 8, 8)
    with torch.no_grad():
        logits = SlidingWindow((8, 8, 8), mirror_axes=(0, 2))(network, image)
        views = [network(image.flip(dims)).flip(dims) for dims in ([], [2], [4], [2, 4])]
    torch.testing.assert_close(logits, torch.stack(views).mean(0), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits, views[0], atol=1e-3)


@pytest.mark.parametrize("axes", [(2,), (0, 0), (-1,)])
def test_mirror_axes_must_be_different_spatial_axes(axes):
    with pytest.raises(
        ValueError, match=r"^mirror_axes must be different spatial axes from 0 to 1, or `all`, got"
    ):
        SlidingWindow((8, 8), mirror_axes=axes)


def test_logits_are_summed_on_the_cpu_if_gpu_memory_is_full():
    """The GPU's error is raised at the first window."""
    calls = 0

    def network(windows):
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60 GiB.")
        return windows.clone()

    image = torch.randn(1, 1, 13, 9)
    logits = SlidingWindow((8, 8))(network, image)
    assert logits.device.type == "cpu"
    assert torch.equal(logits, SlidingWindow((8, 8))(torch.clone, image))

    def full(windows):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60 GiB.")

    with pytest.raises(torch.OutOfMemoryError):
        SlidingWindow((8, 8))(full, image)


def test_without_flips_the_logits_are_not_copied():
    """Those of a batch of windows with many classes are large."""
    logits = torch.randn(2, 3, 8, 8)
    run = _WindowLogits(SlidingWindow((8, 8)), lambda _: logits, torch.zeros(1, 8, 8), axis=0)
    window = Window((slice(0, 8), slice(0, 8)))
    assert run([window, window])[0].data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("axes", [(), (0,), (0, 1)])
def test_a_network_may_return_its_input_or_keep_what_it_returns(axes):
    image = torch.randn(1, 1, 13, 9)
    before = image.clone()
    kept = torch.full((1, 1, 8, 8), 3.0)
    SlidingWindow((8, 8), batch_size=1, mirror_axes=axes)(lambda windows: windows, image)
    logits = SlidingWindow((8, 8), batch_size=1, mirror_axes=axes)(lambda _: kept, image)
    assert torch.equal(image, before)
    assert torch.equal(kept, torch.full_like(kept, 3.0))
    torch.testing.assert_close(logits, torch.full_like(logits, 3.0))


def test_the_axis_of_slabs_has_the_fewest_voxels_in_work():
    cube = SlidingWindow((4, 4, 4))
    flat = SlidingWindow((2, 6, 6))
    slices = SlidingWindow((4, 4), slice_axis=0)
    assert slab_axis([cube], [(10, 9, 30)]) == 2
    assert slab_axis([cube], [(3, 9, 9)]) == 1
    # 2 of 20 planes are fewer than 6 of 30 columns.
    assert slab_axis([flat], [(20, 12, 30)]) == 0
    assert slab_axis([flat, cube, cube], [(6, 12, 30)] * 3) == 2
    assert slab_axis([cube, slices], [(9, 9, 30)] * 2) == 0
    assert slab_axis([cube, cube, flat], [(20, 12, 30)] * 3) == 2
    assert slab_axis([SlidingWindow((8, 8))], [(8, 30, 1)]) == 1
    # Of equal axes the longest: here a quarter, and all of two short ones.
    assert slab_axis([SlidingWindow((5, 10))], [(20, 40)]) == 1
    assert slab_axis([SlidingWindow((8, 16))], [(4, 6)]) == 1


def test_batches_of_many_classes_are_small_on_a_cpu():
    window = SlidingWindow((64, 64, 64), batch_size=4)
    assert window.in_small_batches(105, torch.device("cpu")).batch_size == 1
    assert window.in_small_batches(30, torch.device("cpu")).batch_size == 2
    assert window.in_small_batches(3, torch.device("cpu")) == window
    assert window.in_small_batches(105, torch.device("meta")) == window


def test_equivariant_axes_are_skipped_and_logged(caplog):
    caplog.set_level("INFO")
    assert usable_axes([0, 1, 2], 3, trained_axes=[1, 2], equivariant_axes=[0]) == (1, 2)
    assert "mirror_axes: [0] skipped, the network is equivariant along them" in caplog.text


def test_axes_that_training_did_not_mirror_are_refused():
    with pytest.raises(ArgumentError, match=r"^mirror_axes=\[0, 1\] .* add \[1\] to .* \(now \[0\]\)"):
        usable_axes([0, 1], 2, trained_axes=[0], equivariant_axes=[])
    with pytest.raises(ValueError, match="^mirror_axes must be different spatial axes from 0 to 1"):
        usable_axes([2], 2, trained_axes=[2], equivariant_axes=[])


def test_the_logits_of_each_pair_are_swapped():
    logits = torch.arange(5.0).reshape(1, 5, 1)
    assert swapped_channels(logits, [(1, 2), (4, 3)]).flatten().tolist() == [0, 2, 1, 4, 3]
    assert swapped_channels(logits, []) is logits
