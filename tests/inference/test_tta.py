"""Mirror test-time augmentation: the axes, and the mean over flips."""

import pytest
import torch

from medconv.features.image_level.forward import mean_over_flips
from medconv.features.image_level.multilabel import MultilabelTargets
from medconv.inference.sliding_window import flips, swapped, usable_axes
from medconv.utils.errors import ArgumentError


def test_equivariant_axes_are_skipped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert usable_axes([0, 1, 2], 3, trained_axes=[1, 2], equivariant_axes=[0]) == (1, 2)
    assert "mirror_axes: [0] skipped, the network is equivariant along them" in caplog.text


def test_axes_that_training_did_not_mirror_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^mirror_axes=\[0, 1\] .* add \[1\] to .* \(now \[0\]\)"):
        usable_axes([0, 1], 2, trained_axes=[0], equivariant_axes=[])
    with pytest.raises(ValueError, match="^mirror_axes must be different spatial axes from 0 to 1"):
        usable_axes([2], 2, trained_axes=[2], equivariant_axes=[])


def test_the_logits_of_each_pair_are_swapped() -> None:
    logits = torch.arange(5.0).reshape(1, 5, 1)
    assert swapped(logits, [(1, 2), (4, 3)]).flatten().tolist() == [0, 2, 1, 4, 3]
    assert swapped(logits, []) is logits


def test_decoded_outputs_are_averaged_over_all_flips() -> None:
    """Probabilities are averaged, not logits."""
    assert flips((1, 0)) == [(), (0,), (1,), (0, 1)]
    image, targets = torch.randn(2, 1, 3, 4), MultilabelTargets(("a", "b"))

    def corner(images: torch.Tensor) -> torch.Tensor:
        return torch.stack([images[:, 0, 0, 0], -images[:, 0, 0, 0]], 1)

    corners = image[:, 0][:, [0, -1]][:, :, [0, -1]].flatten(1)
    expected = torch.stack([corners.sigmoid().mean(1), (-corners).sigmoid().mean(1)], 1)
    torch.testing.assert_close(mean_over_flips(corner, image, targets, flips((0, 1))), expected)
    rows = image[:, 0, [0, -1], 0].sigmoid().mean(1)
    torch.testing.assert_close(mean_over_flips(corner, image, targets, flips((0,)))[:, 0], rows)
