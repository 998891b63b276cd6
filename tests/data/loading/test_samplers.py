"""medconv/data/loading/samplers.py: cases in rounds, by weight and by class; where patches lie."""

import pickle
from collections import Counter
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.loading import cases_of, training_cases
from helpers.volumes import label_array, preprocessing_config, save, tiny

from medconv.data.loading.samplers import (
    BalancedPatchSampler,
    CaseRounds,
    ForegroundSampler,
    Sampler,
    balanced,
    class_indices,
    corner_around,
    foreground_corner,
    foreground_voxel,
)
from medconv.data.preprocessing.dataset_cache import fill_store
from medconv.features.image_level import samples

IDS = ("a", "b", "c", "d")
ALIKE = training_cases(cases_of(("a", "b", "c")), (1, 1))
WEIGHTED = training_cases(cases_of(("a", "b", "c"), [1, 1, 2.5]), (1, 1))
TWO_CLASSES = np.array([[1, 1, 1], [2, 5, 5]])
ROWS = np.array([[0, 1, 1], [0, 5, 5], [1, 2, 3], [1, 2, 4], [1, 2, 5], [3, 6, 6]])


def entry_of_shape(shape=(8, 8)):
    rows = np.array([[1, 2, 2], [2, 6, 6]])
    return SimpleNamespace(label=np.zeros(shape, np.uint8), foreground=rows)


def test_cases_come_in_rounds_and_patches_lie_anywhere():
    sampler = Sampler(training_cases(cases_of(IDS), (2, 2)))
    assert Counter(sampler.case_index(n) for n in range(40)) == dict.fromkeys(range(4), 10)
    corners = {tuple(sampler.corner(n, entry_of_shape()).tolist()) for n in range(600)}
    assert corners == {(x, y) for x in range(7) for y in range(7)}


def test_cases_come_by_weights_that_differ():
    sampler = Sampler(training_cases(cases_of(IDS, [1, 1, 1, 5]), (2, 2)))
    assert Counter(sampler.case_index(n) for n in range(800))[3] == pytest.approx(500, abs=30)
    assert Sampler(training_cases(cases_of(IDS, [2, 2, 2, 2]))).weights is None


def test_slices_are_boxes_of_one_voxel():
    sampler = Sampler(training_cases(cases_of(IDS), (3, 2), slice_axis=1))
    assert sampler.box == (3, 1, 2)


def test_a_subclass_sets_the_share_of_foreground_and_centres_on_annotated_classes():
    cases = [replace(case, annotated=(2,)) if case.id == "b" else case for case in cases_of(IDS)]
    sampler = Sampler(training_cases(cases, (1, 1)))
    sampler.foreground_share = 1.0
    drawn = {}
    for n in range(80):
        corner = tuple(sampler.corner(n, entry_of_shape()).tolist())
        drawn.setdefault(sampler.case_index(n), set()).add(corner)
    assert drawn[1] == {(6, 6)} and drawn[0] == {(2, 2), (6, 6)}


def test_a_worker_gets_no_cases():
    """100,000 cases in each worker would cost memory: their reference counts change."""
    sampler = Sampler(training_cases(cases_of(IDS, [1, 2, 3, 4]), (2, 2)))
    assert b"Case" not in pickle.dumps(sampler).replace(b"CaseRounds", b"")


@pytest.mark.parametrize("share", [-0.1, 2, float("nan")])
def test_a_share_lies_between_0_and_1(share):
    with pytest.raises(ValueError, match=f"foreground_share must lie between 0 and 1, got {share}"):
        ForegroundSampler(ALIKE, share)
    assert ForegroundSampler(ALIKE, 1).foreground_share == 1


def centred_entry():
    return SimpleNamespace(label=np.zeros((9, 9), np.uint8), foreground=np.array([[1, 4, 4]]))


@pytest.mark.parametrize("share", [0.0, 0.33, 1.0])
def test_the_share_is_centred_on_foreground(share):
    sampler = ForegroundSampler(ALIKE, share)
    centred = sum((sampler.corner(n, centred_entry()) == 4).all() for n in range(400)) / 400
    assert centred == pytest.approx(share, abs=0.06)


def test_cases_are_those_of_any_sampler():
    for cases in (ALIKE, WEIGHTED):
        samplers = [Sampler(cases), ForegroundSampler(cases, 0.5)]
        drawn = [[sampler.case_index(n) for n in range(30)] for sampler in samplers]
        assert drawn[0] == drawn[1]


def test_weights_contradict_what_was_asked_for():
    with pytest.raises(ValueError, match="by_weight=true needs case weights that differ, but all 3 cases"):
        ForegroundSampler(ALIKE, 0.3, by_weight=True)
    with pytest.raises(ValueError, match=r"by_weight=false draws each .* have weights from 1 to 2\.5"):
        ForegroundSampler(WEIGHTED, 0.3, by_weight=False)
    ForegroundSampler(ALIKE, 0.3, by_weight=False)
    ForegroundSampler(WEIGHTED, 0.3, by_weight=True)


def two_class_entry(rows=TWO_CLASSES):
    return SimpleNamespace(label=np.zeros((9, 9), np.uint8), foreground=rows)


def test_patches_draw_the_class_then_a_case_then_a_voxel():
    cases = training_cases(cases_of(IDS, [1, 1, 3, 1]), (1, 1), class_indices=[[0, 1, 2], [3], []])
    sampler = BalancedPatchSampler(cases, 0.5)
    draws = [sampler.draw(n) for n in range(800)]
    by_class = Counter(label_value for _, label_value in draws)
    assert 160 < by_class[1] < 240 and 160 < by_class[2] < 240 and 350 < by_class[None] < 450
    assert {case_index for case_index, label_value in draws if label_value == 2} == {3}
    of_first = Counter(case_index for case_index, label_value in draws if label_value == 1)
    assert of_first[2] / by_class[1] == pytest.approx(3 / 5, abs=0.1)
    assert [sampler.case_index(n) for n in range(800)] == [case_index for case_index, _ in draws]
    for n, (_, label_value) in enumerate(draws):
        corner = tuple(sampler.corner(n, two_class_entry()).tolist())
        assert label_value is None or corner == {1: (1, 1), 2: (5, 5)}[label_value]


def test_other_patches_lie_anywhere():
    cases = training_cases(cases_of(IDS), (1, 1), class_indices=[[0], [1]])
    sampler = BalancedPatchSampler(cases, 0.0)
    corners = {tuple(sampler.corner(n, two_class_entry()).tolist()) for n in range(300)}
    assert len(corners) > 70
    assert Counter(sampler.case_index(n) for n in range(40)) == dict.fromkeys(range(4), 10)


def test_without_any_foreground_it_is_the_foreground_sampler():
    cases = training_cases(cases_of(IDS), (2, 2), class_indices=[[], []])
    samplers = [BalancedPatchSampler(cases, 0.5), ForegroundSampler(cases, 0.5)]
    for n in range(20):
        first, second = (sampler.corner(n, two_class_entry()).tolist() for sampler in samplers)
        assert first == second


def test_the_kind_of_cases_decides():
    assert isinstance(balanced(training_cases(cases_of(IDS), (2, 2)), 0.3), BalancedPatchSampler)
    assert isinstance(balanced(training_cases(cases_of(IDS)), 0.3), samples.BalancedImageSampler)
    with pytest.raises(ValueError, match="foreground_share must lie between 0 and 1, got 2"):
        balanced(training_cases(cases_of(IDS), (2, 2)), 2)


def test_a_class_is_drawn_where_it_is_annotated(tmp_path, caplog):
    dataset = tiny(tmp_path)
    label = label_array(2)
    save(dataset.cases[2].files[1], label * (label != 2))  # nothing of class 2 in the last case
    store = fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    train = [dataset.cases[0], replace(dataset.cases[1], annotated=(1,)), dataset.cases[2]]
    caplog.set_level("INFO")
    drawn = class_indices(train, dataset.class_names, store)
    assert drawn == [[0, 1, 2], [0]] and "training cases with it, of 3: big in 3, small in 1" in caplog.text
    assert class_indices(train[1:2], dataset.class_names, store) == [[0], []]
    assert "balanced sampling: no training case has a voxel of small" in caplog.text


def test_each_round_has_each_index_once_in_a_new_order():
    rounds = CaseRounds(3, 7)
    orders = [tuple(rounds.index(7 * turn + n) for n in range(7)) for turn in range(20)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len(set(orders)) > 15


def test_elements_depend_on_seed_and_number_alone():
    forwards, backwards, others = CaseRounds(0, 5), CaseRounds(0, 5), CaseRounds(1, 5)
    expected = {number: forwards.index(number) for number in range(30)}
    assert {number: backwards.index(number) for number in reversed(range(30))} == expected
    assert any(others.index(number) != expected[number] for number in range(30))


def test_each_class_has_a_sequence_of_its_own():
    sequences = [CaseRounds(0, 6, class_number=number) for number in (None, 1, 2)]
    assert len({tuple(rounds.index(n) for n in range(24)) for rounds in sequences}) == 3


@pytest.mark.parametrize("weights", [[1, 1, 1, 2.5, 4.5], [0.2, 0.2, 9.6], [3.0, 1.0]])
def test_a_round_has_each_index_by_weight_to_within_one(weights):
    count, shares = len(weights), np.array(weights) / sum(weights)
    total = Counter()
    for seed in range(300):
        rounds = CaseRounds(seed, count, np.array(weights))
        drawn = Counter(rounds.index(number) for number in range(count))
        assert all(abs(drawn[index] - count * share) < 1 for index, share in enumerate(shares))
        total += drawn
    for index, share in enumerate(shares):
        assert total[index] / (300 * count) == pytest.approx(share, abs=0.03)


def test_a_round_by_weight_has_no_order_of_the_cases():
    rounds = CaseRounds(0, 20, np.arange(1, 21))
    drawn = [[rounds.index(20 * number + place) for place in range(20)] for number in range(2)]
    assert all(of_round != sorted(of_round) for of_round in drawn)


def entry(rows, shape=(9, 9)):
    return SimpleNamespace(label=np.zeros(shape, np.uint8), foreground=rows)


def slow_corners(image_size, patch_size):
    """All corners of patches inside the image; the one that pads both sides where the image is smaller."""
    inside = [corner for corner in range(image_size) if corner + patch_size <= image_size]
    padding = patch_size - image_size
    return inside or [-((padding + 1) // 2)]


def test_every_corner_inside_is_drawn():
    rng = np.random.default_rng(0)
    image_shape, box = (5, 4, 3), (3, 4, 6)
    unlabelled = entry(ROWS[:0], image_shape)
    drawn = Counter(tuple(foreground_corner(rng, unlabelled, box, 0.0).tolist()) for _ in range(300))
    assert set(drawn) == set(product(*map(slow_corners, image_shape, box)))
    assert min(drawn.values()) > 70


@pytest.mark.parametrize("box", [(1,), (3,), (4,), (7,), (10,)])
def test_a_voxel_is_as_central_as_the_image_allows(box):
    image_shape = (7,)
    for voxel in range(7):
        (corner,) = corner_around((voxel,), image_shape, box)
        allowed = slow_corners(7, box[0])
        assert corner == min(allowed, key=lambda first: abs(first + box[0] // 2 - voxel))


def test_a_random_voxel_is_of_a_random_class():
    rng = np.random.default_rng(0)
    drawn = Counter(tuple(foreground_voxel(ROWS[2:], rng).tolist()) for _ in range(600))
    assert 260 < drawn[6, 6] < 340  # one voxel of class 3 as often as three of class 1
    assert all(70 < drawn[2, y] < 130 for y in (3, 4, 5))


def test_labelled_voxels_are_apart_from_the_foreground():
    rng = np.random.default_rng(4)
    labelled = {tuple(foreground_corner(rng, entry(ROWS), (1, 1), 0.0).tolist()) for _ in range(60)}
    assert labelled == {(1, 1), (5, 5)}
    foreground = {tuple(foreground_corner(rng, entry(ROWS), (1, 1), 1.0).tolist()) for _ in range(90)}
    assert foreground == {(2, 3), (2, 4), (2, 5), (6, 6)}


def test_only_the_given_classes_are_centred_on():
    rng = np.random.default_rng(3)
    rows = ROWS[2:]
    drawn = {tuple(foreground_corner(rng, entry(rows), (1, 1), 1.0, [3]).tolist()) for _ in range(20)}
    assert drawn == {(6, 6)}
    anywhere = {tuple(foreground_corner(rng, entry(rows), (1, 1), 1.0, [2]).tolist()) for _ in range(50)}
    assert len(anywhere) > 20  # the case has no voxel of class 2
