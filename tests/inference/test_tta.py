"""Mirror test-time augmentation: the axes, and the mean over flips."""

import pytest
import torch

from medconv.inference.sliding_window import swapped, usable_axes
from medconv.utils.errors import ArgumentError


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
    assert swapped(logits, [(1, 2), (4, 3)]).flatten().tolist() == [0, 2, 1, 4, 3]
    assert swapped(logits, []) is logits
