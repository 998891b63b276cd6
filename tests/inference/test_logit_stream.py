"""Streams of logits: planes asked for a few at a time are those of the whole image."""

import pytest
import torch

from medconv.inference import sliding_window
from medconv.inference.sliding_window import EVEN_DISTANCE, FIXED_DISTANCE, SlidingWindow

PATCH = (6, 4, 4)


def network(windows):
    """Depends on where a voxel is in its window."""
    return torch.cat([windows.cumsum(2), windows * windows.mean((2, 3), keepdim=True), windows.sin()], 1)


def volume(*size):
    return torch.randn(1, *size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("size", [(13, 9, 7), (5, 20, 9), (30, 4, 3)])
@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("placement", [FIXED_DISTANCE, EVEN_DISTANCE])
def test_planes_are_those_of_the_whole_image(axis, size, batch_size, placement):
    """Also those of an image that is padded, and asked for with overlap, as interpolation does."""
    image = volume(*size)
    window = SlidingWindow(PATCH, 0.5, batch_size, placement=placement)
    whole = window(network, image[None])[0].movedim(1 + axis, 1)
    stream = window.stream(network, image, axis, planes_at_once=3)
    assert stream.length == size[axis]
    for first in range(0, stream.length, 2):
        stop = min(first + 3, stream.length)
        torch.testing.assert_close(stream.take(first, stop), whole[:, first:stop], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("classes_at_once", [0, 1, 2, 3, 5])
def test_logits_are_weighted_a_few_classes_at_a_time(classes_at_once, monkeypatch):
    """A copy of all would be as large as the window's logits."""
    window = SlidingWindow(PATCH, 0.5, batch_size=2)
    expected = window(network, volume(13, 9, 7)[None])
    monkeypatch.setattr(sliding_window, "_VALUES_AT_ONCE", classes_at_once * 6 * 4 * 4)
    stream = window.stream(network, volume(13, 9, 7), 0)
    assert torch.equal(stream.take(0, stream.length), expected[0])
    assert len(stream._weighted) == max(1, min(classes_at_once, 3))


@pytest.mark.parametrize("placement", [FIXED_DISTANCE, EVEN_DISTANCE])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_planes_that_would_take_much_memory_have_half_the_bytes(placement, scale, monkeypatch):
    """Where labels alone follow: with fp16's digits also in the corners, whose weights are small."""
    image = volume(13, 9, 7)
    window = SlidingWindow(PATCH, 0.75, placement=placement)

    def large(windows):
        return scale * network(windows)

    exact = window.stream(large, image, 0, 3).take(0, 3)
    assert exact.dtype == torch.float32
    monkeypatch.setattr(sliding_window, "_HALF_ABOVE", 100)
    assert window.stream(large, image, 0, 3).take(0, 3).dtype == torch.float32
    half = window.stream(large, image, 0, 3, only_labels=True).take(0, 3)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), exact, rtol=4e-3, atol=4e-3 * scale)


def test_planes_of_more_than_a_gibibyte_in_fp32_take_half():
    assert not sliding_window.takes_half(64, 2**22)
    assert sliding_window.takes_half(64, 2**22 + 1)


@pytest.mark.parametrize("large", [1e5, -1e5])
@pytest.mark.parametrize("first_large", [0, 3, 17])
def test_logits_beyond_fp16_go_on_in_fp32(first_large, large, monkeypatch, caplog):
    """From the first window with such logits on; planes before it are not lost."""
    monkeypatch.setattr(sliding_window, "_HALF_ABOVE", 100)
    image = volume(25, 9, 7)
    calls = 0

    def growing(windows):
        nonlocal calls
        calls += 1
        # All classes are beyond 65504, and the largest one counts.
        return network(windows) + (large if calls > first_large else 0.0)

    window = SlidingWindow(PATCH, 0.75, batch_size=2)
    exact = window(growing, image[None])[0]
    calls = 0
    stream = window.stream(growing, image, 0, 3, only_labels=True)
    with caplog.at_level("INFO"):
        for first in range(0, stream.length, 2):
            stop = min(first + 3, stream.length)
            logits = stream.take(first, stop)
            torch.testing.assert_close(logits.float(), exact[:, first:stop], rtol=3e-6, atol=2e-2)
    assert logits.dtype == torch.float32
    assert caplog.text.count("logits exceed the range of fp16") == (first_large > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("placement", [FIXED_DISTANCE, EVEN_DISTANCE])
def test_logits_are_summed_in_fp32_or_their_own_precision(placement, dtype):
    """In bf16, MONAI rounds the products, and nnU-Net nothing."""
    image = volume(13, 9, 7)
    window = SlidingWindow(PATCH, 0.75, placement=placement)
    logits = window(lambda windows: network(windows).to(dtype), image[None])
    exact = window(lambda windows: network(windows).to(dtype).double(), image[None])
    rounds_products = dtype == torch.bfloat16 and not placement.sums_in_fp32
    is_summed_in_fp64 = dtype == torch.float64 and not placement.sums_in_fp32
    assert logits.dtype == (torch.float64 if is_summed_in_fp64 else torch.float32)
    tolerance = 1e-2 if rounds_products else 2e-5
    torch.testing.assert_close(logits.double(), exact.double(), rtol=tolerance, atol=tolerance)
    assert rounds_products != torch.allclose(logits.double(), exact.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 65504.0, -65504.0])
def test_fp32_would_not_make_logits_finite(value, monkeypatch):
    """Of a network whose outputs are not finite, or are in fp16."""
    monkeypatch.setattr(sliding_window, "_HALF_ABOVE", 100)
    window = SlidingWindow(PATCH, 0.5)
    stream = window.stream(lambda windows: windows * 0 - value, volume(13, 9, 7), 0, 3, only_labels=True)
    logits = stream.take(0, 3)
    assert logits.dtype == torch.float16
    assert bool(logits.isfinite().all()) == (abs(value) == 65504.0)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_are_planes(axis):
    image = volume(7, 8, 9)
    window = SlidingWindow((4, 4), 0.5, batch_size=3, slice_axis=axis)
    whole = window(network, image[None])[0].movedim(1 + axis, 1)
    stream = window.stream(network, image, axis, planes_at_once=1)
    for plane in range(stream.length):
        assert torch.equal(stream.take(plane, plane + 1), whole[:, plane : plane + 1])
    assert stream.num_values < 4 * image[0].numel() / stream.length


def test_memory_does_not_grow_with_the_length():
    window = SlidingWindow(PATCH, 0.5, batch_size=2)
    short, long = (window.stream(network, volume(length, 8, 8), 0, 2).num_values for length in (30, 300))
    # A batch of two windows may lie in two rows of nine; of two planes asked for, one waits.
    assert short == long == 8 * 8 * (6 + 3 + 1)
    # All planes at once are no more than there are.
    assert window.stream(network, volume(30, 8, 8), 0).num_values == 8 * 8 * 30


def test_planes_may_be_left_out():
    """Windows of planes that nobody asks for are added before those that are."""
    image = volume(40, 8, 8)
    window = SlidingWindow(PATCH, 0.5, batch_size=2)
    stream = window.stream(network, image, 0, planes_at_once=3)
    whole = window(network, image[None])[0]
    for first in (5, 30):
        torch.testing.assert_close(stream.take(first, first + 3), whole[:, first : first + 3])


def test_windows_are_run_as_their_planes_are_asked_for():
    calls = []

    def counting(windows):
        calls.append(len(windows))
        return windows

    stream = SlidingWindow((4, 4), 0.0, batch_size=1).stream(counting, volume(12, 4), 0, 2)
    stream.take(0, 2)
    assert len(calls) == 1
    stream.take(2, 4)
    assert len(calls) == 1
    stream.take(4, 5)
    assert len(calls) == 2


def test_a_sum_that_outgrows_the_gpu_goes_on_in_the_computers_memory():
    """What was summed before stays; the GPU's error comes at the third call."""
    calls = 0

    def full(windows):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60 GiB.")
        return network(windows)

    image = volume(13, 9, 7)
    window = SlidingWindow(PATCH, batch_size=1)
    logits = window(full, image[None])
    assert logits.device.type == "cpu" and torch.equal(logits, window(network, image[None]))


def test_windows_of_one_value_are_computed_once():
    """Air is; a window with other voxels, or another value, is not."""
    calls = []

    def counting(windows):
        calls.append(len(windows))
        return windows.cumsum(2)

    image = torch.full((1, 40, 8, 8), -1.0)
    image[:, 16:24] = 2.0
    image[0, 35, 1, 1] = 0.0
    window = SlidingWindow((8, 4, 4), 0.0, batch_size=3)
    logits = window(counting, image[None])
    # Of five rows of four windows: air, two, and one of the last row.
    assert sum(calls) == 3
    expected = image.reshape(1, 5, 8, 8, 8).cumsum(2).reshape(1, 40, 8, 8)
    torch.testing.assert_close(logits[0], expected)


def test_windows_of_one_value_have_it_in_each_channel():
    """The second of two channels differs between windows, or inside of one."""
    image = torch.zeros(2, 24, 4, 4)
    image[1, 8:16] = 1.0
    image[1, 20, 2, 2] = 3.0
    window = SlidingWindow((8, 4, 4), 0.0, batch_size=3)
    torch.testing.assert_close(window(torch.clone, image[None])[0], image)


def test_a_few_constants_are_kept_without_the_memory_of_their_batch():
    image = torch.arange(6.0).repeat_interleave(8)[None, :, None, None].expand(1, 48, 4, 4)
    stream = SlidingWindow((8, 4, 4), 0.0, batch_size=3).stream(torch.clone, image, 0)
    torch.testing.assert_close(stream.take(0, 48), image)
    known = stream._network.known.values()
    assert len(known) == 4
    assert all(logits.untyped_storage().nbytes() == 4 * 8 * 4 * 4 for logits in known)


def test_planes_that_are_asked_for_are_not_copied():
    """Those of 105 classes on 512 x 512 voxels are 100 MB each."""
    stream = SlidingWindow(PATCH, 0.5, batch_size=2).stream(network, volume(40, 8, 8), 0, planes_at_once=3)
    for first in range(0, stream.length, 2):
        logits = stream.take(first, min(first + 3, stream.length))
        assert logits.untyped_storage().data_ptr() == stream._sum.untyped_storage().data_ptr()
