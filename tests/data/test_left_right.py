"""medconv/data/left_right.py, and what the sliding window does with `data.flip_label_pairs`."""

import pytest
import torch
from torch import Tensor

from medconv.data import left_right
from medconv.inference.sliding_window import SlidingWindow
from medconv.targets.regions import RegionTargets
from medconv.utils.errors import ArgumentError

NAMES = ("background", "left_kidney", "spleen", "right_kidney", "lung_l", "lung_r")


def test_pairs_are_class_numbers():
    pairs = [["left_kidney", "right_kidney"], ["lung_r", "lung_l"]]
    assert left_right.flip_label_pairs(pairs, NAMES, NAMES[1:]) == ((1, 3), (5, 4))
    assert left_right.flip_label_pairs([], NAMES, NAMES[1:]) == ()


def test_pairs_of_names_without_a_background_are_numbered_from_0():
    assert left_right.flip_label_pairs([["left_kidney", "spleen"]], NAMES[1:], NAMES[1:]) == ((0, 1),)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            [["left_kidny", "right_kidney"]],
            r"flip_label_pairs: there is no left_kidny to swap; did you mean left_kidney\?",
        ),
        (
            [["liver!", "spleen"]],
            r"flip_label_pairs: there is no liver! to swap; the names are left_kidney, spleen",
        ),
        ([["background", "spleen"]], r"flip_label_pairs: there is no background to swap"),
        (
            [["spleen", "spleen"]],
            r"flip_label_pairs needs pairs of two different names.*got \[\['spleen', 'spleen'\]\]",
        ),
        ([["spleen"]], r"flip_label_pairs needs pairs.*got \[\['spleen'\]\]"),
        ([["spleen", "lung_l", "lung_r"]], r"flip_label_pairs needs pairs"),
        (["lung_l", "lung_r"], r"flip_label_pairs needs pairs.*got \['lung_l', 'lung_r'\]"),
        ("lung_l", r"flip_label_pairs needs pairs.*got lung_l"),
        (
            [["lung_l", "lung_r"], ["lung_r", "spleen"]],
            r"flip_label_pairs: a name has one partner, lung_r has more",
        ),
    ],
)
def test_invalid_pairs_are_errors(pairs, message):
    with pytest.raises(ArgumentError, match=message):
        left_right.flip_label_pairs(pairs, NAMES, NAMES[1:])


def test_lookalikes_differ_only_in_left_and_right():
    assert left_right.lookalikes(NAMES) == [("left_kidney", "right_kidney"), ("lung_l", "lung_r")]
    assert left_right.lookalikes(["Left Eye", "Right Eye", "LeftLung", "RightLung"]) == [
        ("Left Eye", "Right Eye"),
        ("LeftLung", "RightLung"),
    ]
    assert left_right.lookalikes(["liver", "river", "lobe 1", "lobe 2", "anterior", "posterior"]) == []


class Sided:
    """A network that distinguishes left and right: class 1 where the image is above 0 in the first half, class 2 in the second."""

    def __call__(self, windows: Tensor) -> Tensor:
        first = torch.arange(windows.shape[2]) < windows.shape[2] // 2
        first = first.reshape(-1, *(1,) * (windows.ndim - 3)).expand(windows.shape[2:])
        return torch.stack([-windows[:, 0], windows[:, 0] * first, windows[:, 0] * ~first], 1)


@pytest.mark.parametrize("spatial", [2, 3])
def test_window_swaps_the_logits_of_pairs_when_mirroring_left_and_right(spatial):
    """For `Sided`, the mean over flips changes nothing if pairs are swapped."""
    image, patch = torch.randn(1, 1, *(8,) * spatial), (8,) * spatial
    plain = SlidingWindow(patch)(Sided(), image)
    for axes in ((0,), (0, 1), (1,)):
        mirrored = SlidingWindow(patch, mirror_axes=axes, flip_label_pairs=((1, 2),))(Sided(), image)
        torch.testing.assert_close(mirrored, plain, rtol=1e-4, atol=1e-5)
    not_swapped = SlidingWindow(patch, mirror_axes=(0,))(Sided(), image)
    assert not torch.allclose(not_swapped, plain, atol=1e-2)


@pytest.mark.parametrize(("slice_axis", "swaps"), [(0, False), (1, True), (2, True)])
def test_first_axis_of_slices_is_left_to_right_unless_they_are_sagittal(slice_axis, swaps):
    image = torch.randn(1, 1, 8, 8, 8)
    window = SlidingWindow((8, 8), mirror_axes=(0,), slice_axis=slice_axis)
    paired = SlidingWindow((8, 8), mirror_axes=(0,), slice_axis=slice_axis, flip_label_pairs=((1, 2),))
    assert torch.equal(window(Sided(), image), paired(Sided(), image)) != swaps


@pytest.mark.parametrize(
    ("regions", "lookalikes"),
    [
        ({"both": [1, 3]}, None),
        ({"left": [1], "both": [1, 3]}, "left_kidney and right_kidney"),
        ({"l": [2], "r": [4]}, "l and r"),
    ],
)
def test_warning_for_regions_does_not_recommend_pairs(regions, lookalikes, caplog):
    """`data.flip_label_pairs` excludes regions; classes that no region separates may be swapped."""
    values = tuple(map(tuple, regions.values()))
    targets = RegionTargets(tuple(regions), values, None, tuple(group[0] for group in values))
    left_right.warn_of_lookalikes(targets, NAMES[:5], (), 0, (0,), ())
    warning = "augmentation: mirror_axes=[0] swaps left and right but no regions: {}; mirror along other axes"
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ([] if lookalikes is None else [warning.format(lookalikes)])
