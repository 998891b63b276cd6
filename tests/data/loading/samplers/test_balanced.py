"""medconv/data/loading/samplers/balanced.py: each class equally often, of patches and of whole images."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.loading import cases_of, training_cases
from helpers.volumes import label_array, preprocessing_config, save, tiny

from medconv.data.loading.samplers.balanced import (
    BalancedImageSampler,
    BalancedPatchSampler,
    balanced,
    class_indices,
)
from medconv.data.loading.samplers.foreground import ForegroundSampler
from medconv.data.preprocessing.pipeline import prepare

IDS = ("a", "b", "c", "d")
ROWS = np.array([[1, 1, 1], [2, 5, 5]])


def entry(rows: np.ndarray = ROWS) -> Any:
    return SimpleNamespace(label=np.zeros((9, 9), np.uint8), foreground=rows)


def test_patches_draw_the_class_then_a_case_then_a_voxel() -> None:
    cases = training_cases(cases_of(IDS, [1, 1, 3, 1]), (1, 1), class_indices=[[0, 1, 2], [3], []])
    sampler = BalancedPatchSampler(cases, 0.5)
    draws = [sampler.draw(0, n) for n in range(800)]
    by_class = Counter(label_value for _, label_value in draws)
    assert 160 < by_class[1] < 240 and 160 < by_class[2] < 240 and 350 < by_class[None] < 450
    assert {case_index for case_index, label_value in draws if label_value == 2} == {3}
    of_first = Counter(case_index for case_index, label_value in draws if label_value == 1)
    assert of_first[2] / by_class[1] == pytest.approx(3 / 5, abs=0.1)
    assert [sampler.case_index(0, n) for n in range(800)] == [case_index for case_index, _ in draws]
    for n, (_, label_value) in enumerate(draws):
        corner = tuple(sampler.corner(0, n, entry()).tolist())
        assert label_value is None or corner == {1: (1, 1), 2: (5, 5)}[label_value]


def test_other_patches_lie_anywhere() -> None:
    cases = training_cases(cases_of(IDS), (1, 1), class_indices=[[0], [1]])
    sampler = BalancedPatchSampler(cases, 0.0)
    corners = {tuple(sampler.corner(0, n, entry()).tolist()) for n in range(300)}
    assert len(corners) > 70
    assert Counter(sampler.case_index(0, n) for n in range(40)) == dict.fromkeys(range(4), 10)


def test_without_any_foreground_it_is_the_foreground_sampler() -> None:
    cases = training_cases(cases_of(IDS), (2, 2), class_indices=[[], []])
    samplers = [BalancedPatchSampler(cases, 0.5), ForegroundSampler(cases, 0.5)]
    for n in range(20):
        first, second = (sampler.corner(0, n, entry()).tolist() for sampler in samplers)
        assert first == second


def test_image_level_classes_take_turns_and_so_do_their_cases() -> None:
    indices = [[0, 1, 2], [], [3]]
    sampler = BalancedImageSampler(training_cases(cases_of(IDS), class_indices=indices))
    drawn = [sampler.case_index(0, n) for n in range(60)]
    assert Counter(drawn) == {0: 10, 1: 10, 2: 10, 3: 30}
    assert all((drawn[n] == 3) != (drawn[n + 1] == 3) for n in range(0, 60, 2))
    of_first = [case_index for case_index in drawn if case_index != 3]
    assert all(sorted(of_first[n : n + 3]) == [0, 1, 2] for n in range(0, 30, 3))
    backwards = BalancedImageSampler(training_cases(cases_of(IDS), class_indices=indices))
    assert [backwards.case_index(0, n) for n in reversed(range(60))][::-1] == drawn


def test_weights_count_within_an_image_level_class() -> None:
    cases = training_cases(cases_of(IDS, [1, 3, 1, 1]), class_indices=[[0, 1], [2, 3]])
    sampler = BalancedImageSampler(cases)
    drawn = Counter(sampler.case_index(0, n) for n in range(400))
    assert drawn[0] == pytest.approx(50, abs=15) and drawn[1] == pytest.approx(150, abs=15)
    assert drawn[2] == drawn[3] == 100


def test_one_image_level_class_is_drawn_alone() -> None:
    sampler = BalancedImageSampler(training_cases(cases_of(IDS), class_indices=[[], [1, 2]]))
    assert Counter(sampler.case_index(0, n) for n in range(20)) == {1: 10, 2: 10}


def test_the_kind_of_cases_decides() -> None:
    assert isinstance(balanced(training_cases(cases_of(IDS), (2, 2)), 0.3), BalancedPatchSampler)
    assert isinstance(balanced(training_cases(cases_of(IDS)), 0.3), BalancedImageSampler)
    with pytest.raises(ValueError, match="foreground_share must lie between 0 and 1, got 2"):
        balanced(training_cases(cases_of(IDS), (2, 2)), 2)


def test_a_class_is_drawn_where_it_is_annotated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = tiny(tmp_path)
    label = label_array(2)
    save(dataset.cases[2].files[1], label * (label != 2))  # nothing of class 2 in the last case
    store = prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    train = [dataset.cases[0], replace(dataset.cases[1], annotated=(1,)), dataset.cases[2]]
    caplog.set_level("INFO")
    drawn = class_indices(train, dataset.targets, dataset.class_names, store)
    assert drawn == [[0, 1, 2], [0]] and "of 3 training cases: big in 3, small in 1" in caplog.text
    assert class_indices(train[1:2], dataset.targets, dataset.class_names, store) == [[0], []]
    assert "balanced sampling: no training case has a voxel of small" in caplog.text
