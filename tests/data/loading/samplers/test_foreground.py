"""medconv/data/loading/samplers/foreground.py: shares and weights; corners are in test_corners.py."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.loading import cases_of, training_cases

from medconv.data.loading.samplers.base import Sampler
from medconv.data.loading.samplers.foreground import ForegroundSampler

ALIKE = training_cases(cases_of(("a", "b", "c")), (1, 1))
WEIGHTED = training_cases(cases_of(("a", "b", "c"), [1, 1, 2.5]), (1, 1))


def entry() -> Any:
    return SimpleNamespace(label=np.zeros((9, 9), np.uint8), foreground=np.array([[1, 4, 4]]))


@pytest.mark.parametrize("share", [0.0, 0.33, 1.0])
def test_the_share_is_centred_on_foreground(share: float) -> None:
    sampler = ForegroundSampler(ALIKE, share)
    centred = sum((sampler.corner(0, n, entry()) == 4).all() for n in range(400)) / 400
    assert centred == pytest.approx(share, abs=0.06)


def test_cases_are_those_of_any_sampler() -> None:
    for cases in (ALIKE, WEIGHTED):
        samplers = [Sampler(cases), ForegroundSampler(cases, 0.5)]
        drawn = [[sampler.case_index(1, n) for n in range(30)] for sampler in samplers]
        assert drawn[0] == drawn[1]


def test_weights_contradict_what_was_asked_for() -> None:
    with pytest.raises(ValueError, match="by_weight=true needs case weights that differ, but all 3 cases"):
        ForegroundSampler(ALIKE, 0.3, by_weight=True)
    with pytest.raises(ValueError, match=r"by_weight=false draws each .* have weights from 1 to 2\.5"):
        ForegroundSampler(WEIGHTED, 0.3, by_weight=False)
    ForegroundSampler(ALIKE, 0.3, by_weight=False)
    ForegroundSampler(WEIGHTED, 0.3, by_weight=True)
    with pytest.raises(ValueError, match="foreground_share must lie between 0 and 1, got 3"):
        ForegroundSampler(ALIKE, 3)
