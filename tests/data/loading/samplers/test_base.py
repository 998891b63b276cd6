"""medconv/data/loading/samplers/base.py: what a sampler of one's own inherits."""

import pickle
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.loading import cases_of, training_cases

from medconv.data.loading.samplers.base import Sampler, checked_share

IDS = ("a", "b", "c", "d")


def entry(shape: tuple[int, ...] = (8, 8)) -> Any:
    rows = np.array([[1, 2, 2], [2, 6, 6]])
    return SimpleNamespace(label=np.zeros(shape, np.uint8), foreground=rows)


def test_cases_come_in_rounds_and_patches_lie_anywhere() -> None:
    sampler = Sampler(training_cases(cases_of(IDS), (2, 2)))
    assert Counter(sampler.case_index(0, n) for n in range(40)) == dict.fromkeys(range(4), 10)
    corners = {tuple(sampler.corner(0, n, entry()).tolist()) for n in range(600)}
    assert corners == {(x, y) for x in range(7) for y in range(7)}


def test_cases_come_by_weights_that_differ() -> None:
    sampler = Sampler(training_cases(cases_of(IDS, [1, 1, 1, 5]), (2, 2)))
    assert Counter(sampler.case_index(0, n) for n in range(800))[3] == pytest.approx(500, abs=30)
    assert Sampler(training_cases(cases_of(IDS, [2, 2, 2, 2]))).weights is None


def test_slices_are_boxes_of_one_voxel() -> None:
    sampler = Sampler(training_cases(cases_of(IDS), (3, 2), slice_axis=1))
    assert sampler.box == (3, 1, 2)


def test_a_subclass_sets_the_share_of_foreground_and_centres_on_annotated_classes() -> None:
    cases = [replace(case, annotated=(2,)) if case.id == "b" else case for case in cases_of(IDS)]
    sampler = Sampler(training_cases(cases, (1, 1)))
    sampler.foreground_share = 1.0
    drawn: dict[int, set[tuple[int, ...]]] = {}
    for n in range(80):
        corner = tuple(sampler.corner(0, n, entry()).tolist())
        drawn.setdefault(sampler.case_index(0, n), set()).add(corner)
    assert drawn[1] == {(6, 6)} and drawn[0] == {(2, 2), (6, 6)}


def test_a_worker_gets_no_cases() -> None:
    """100,000 cases in each worker would cost memory: their reference counts change."""
    sampler = Sampler(training_cases(cases_of(IDS, [1, 2, 3, 4]), (2, 2)))
    assert b"Case" not in pickle.dumps(sampler).replace(b"CaseRounds", b"")


@pytest.mark.parametrize("share", [-0.1, 2, float("nan")])
def test_a_share_lies_between_0_and_1(share: float) -> None:
    with pytest.raises(ValueError, match=f"foreground_share must lie between 0 and 1, got {share}"):
        checked_share(share)
    assert checked_share(1) == 1
