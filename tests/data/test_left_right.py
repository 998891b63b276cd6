"""medconv/data/left_right.py and what `data.flip_label_pairs` changes: augmentation, test-time
augmentation, equivariant networks.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from torch import Tensor

from medconv.config import ConfigError
from medconv.data import left_right
from medconv.inference.load import load
from medconv.inference.sliding_window import SlidingWindow

NAMES = ("background", "left_kidney", "spleen", "right_kidney", "lung_l", "lung_r")


def test_pairs_are_class_numbers() -> None:
    assert left_right.flip_label_pairs([["left_kidney", "right_kidney"], ["lung_r", "lung_l"]], NAMES) == (
        (1, 3),
        (5, 4),
    )
    assert left_right.flip_label_pairs(None, NAMES) == left_right.flip_label_pairs([], NAMES) == ()


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            [["left_kidny", "right_kidney"]],
            r"data\.flip_label_pairs: left_kidny is not a foreground class.*did you mean left_kidney\?",
        ),
        (
            [["liver!", "spleen"]],
            r"data\.flip_label_pairs: liver! is not a foreground class.*the classes are left_kidney, spleen",
        ),
        ([["background", "spleen"]], r"data\.flip_label_pairs: background is not a foreground class"),
        (
            [["spleen", "spleen"]],
            r"data\.flip_label_pairs needs pairs of two different classes.*got \[\['spleen', 'spleen'\]\]",
        ),
        ([["spleen"]], r"data\.flip_label_pairs needs pairs.*got \[\['spleen'\]\]"),
        ([["spleen", "lung_l", "lung_r"]], r"data\.flip_label_pairs needs pairs"),
        (["lung_l", "lung_r"], r"data\.flip_label_pairs needs pairs.*got \['lung_l', 'lung_r'\]"),
        ("lung_l", r"data\.flip_label_pairs needs pairs.*got lung_l"),
        (
            [["lung_l", "lung_r"], ["lung_r", "spleen"]],
            r"data\.flip_label_pairs: a class has one partner, lung_r has more",
        ),
    ],
)
def test_invalid_pairs_are_errors(pairs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        left_right.flip_label_pairs(pairs, NAMES)


def test_lookalikes_differ_only_in_left_and_right() -> None:
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
def test_window_swaps_the_logits_of_pairs_when_mirroring_left_and_right(spatial: int) -> None:
    """For `Sided`, the mean over flips changes nothing if pairs are swapped."""
    image, patch = torch.randn(1, 1, *(8,) * spatial), (8,) * spatial
    plain = SlidingWindow(patch)(Sided(), image)
    for axes in ((0,), (0, 1), (1,)):
        mirrored = SlidingWindow(patch, mirror_axes=axes, flip_label_pairs=((1, 2),))(Sided(), image)
        torch.testing.assert_close(mirrored, plain, rtol=1e-4, atol=1e-5)
    not_swapped = SlidingWindow(patch, mirror_axes=(0,))(Sided(), image)
    assert not torch.allclose(not_swapped, plain, atol=1e-2)


@pytest.mark.parametrize(("slice_axis", "swaps"), [(0, False), (1, True), (2, True)])
def test_first_axis_of_slices_is_left_to_right_unless_they_are_sagittal(slice_axis: int, swaps: bool) -> None:
    image = torch.randn(1, 1, 8, 8, 8)
    window = SlidingWindow((8, 8), mirror_axes=(0,), slice_axis=slice_axis)
    paired = SlidingWindow((8, 8), mirror_axes=(0,), slice_axis=slice_axis, flip_label_pairs=((1, 2),))
    assert torch.equal(window(Sided(), image), paired(Sided(), image)) != swaps


@pytest.fixture(scope="module")
def kidneys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny dataset with names that have sides."""
    root = tiny.write_dataset(tmp_path_factory.mktemp("kidneys") / "tiny")
    meta = json.loads((root / "dataset.json").read_text())
    meta["labels"] = {"0": "background", "1": "left_kidney", "2": "right_kidney"}
    (root / "dataset.json").write_text(json.dumps(meta))
    return root


PAIRS = "data.flip_label_pairs=[[left_kidney,right_kidney]]"


def test_pairs_reach_augmentation_validation_and_prediction(kidneys: Path, tmp_path: Path) -> None:
    settings = [
        PAIRS,
        "augmentation.mirror_axes=[0]",
        "task.mirror_axes=[0]",
        f"augmentation._target_={__name__}.RecordingAugment",
    ]
    tiny.train(kidneys, tmp_path / "run", *settings, "trainer.max_steps=1")
    arguments = RecordingAugment.arguments
    assert arguments["flip_label_pairs"] == ((1, 2),) and arguments["left_right_axis"] == 0
    model = load(tmp_path / "run/checkpoints/last.ckpt")
    assert model.window.flip_label_pairs == ((1, 2),) and model.window.mirror_axes == (0,)


class RecordingAugment:
    """An augmentation that does nothing and records its arguments."""

    arguments: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, **arguments: Any) -> None:
        type(self).arguments = arguments

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch


@pytest.mark.parametrize("more", [[], ["data.spatial_dims=2"]])
def test_equivariant_network_is_an_error(kidneys: Path, tmp_path: Path, more: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"conv=mirror along axis 0.*cannot tell left_kidney from right_kidney"
    ):
        tiny.train(kidneys, tmp_path / "run", PAIRS, "conv=mirror", *more)


def test_equivariance_along_another_axis_is_allowed(kidneys: Path, tmp_path: Path) -> None:
    tiny.train(kidneys, tmp_path / "run", PAIRS, "conv=mirror", "conv.axes=[1]", "trainer.max_steps=1")


@pytest.mark.parametrize(
    ("regions", "lookalikes"),
    [
        ({"both": [1, 3]}, None),
        ({"left": [1], "both": [1, 3]}, "left_kidney and right_kidney"),
        ({"l": [2], "r": [4]}, "l and r"),
    ],
)
def test_warning_for_regions_does_not_recommend_pairs(
    regions: dict[str, list[int]], lookalikes: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """`data.flip_label_pairs` excludes regions; classes that no region separates may be swapped."""
    targets = {"names": list(regions), "values": list(regions.values())}
    left_right.warn_of_lookalikes(
        {"class_names": list(NAMES[:5]), "overlapping": True, "targets": targets}, (0,), ()
    )
    warning = "augmentation.mirror_axes=[0] swaps left and right but no regions: {}; mirror along other axes"
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ([] if lookalikes is None else [warning.format(lookalikes)])


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (["augmentation.mirror_axes=[0]"], "data.flip_label_pairs=[[left_kidney,right_kidney]] would"),
        (["conv=mirror"], "makes a network that cannot tell left_kidney from right_kidney"),
        (["augmentation.mirror_axes=[1]"], None),
        (["augmentation.mirror_axes=[0]", PAIRS], None),
    ],
)
def test_one_warning_if_sides_are_mixed(
    kidneys: Path, tmp_path: Path, settings: list[str], warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "medconv"):
        tiny.train(kidneys, tmp_path / "run", *settings, "trainer.max_steps=1")
    messages = [record.getMessage() for record in caplog.records if "left_kidney" in record.getMessage()]
    assert len(messages) == (warning is not None)
    assert warning is None or warning in messages[0]
