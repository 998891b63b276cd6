"""medconv/data/loading/samplers/case_rounds.py: rounds of cases, alike or by weight."""

from collections import Counter

import numpy as np
import pytest

from medconv.data.loading.samplers.case_rounds import CaseRounds, shuffled


def test_each_round_has_each_index_once_in_a_new_order() -> None:
    rounds = CaseRounds(7)
    orders = [tuple(rounds.index(3, 7 * turn + n) for n in range(7)) for turn in range(20)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len(set(orders)) > 15


def test_elements_depend_on_seed_and_number_alone() -> None:
    forwards, backwards = CaseRounds(5), CaseRounds(5)
    pairs = [(seed, number) for seed in (0, 1) for number in range(30)]
    expected = {pair: forwards.index(*pair) for pair in pairs}
    assert {pair: backwards.index(*pair) for pair in reversed(pairs)} == expected
    assert any(expected[0, number] != expected[1, number] for number in range(30))


def test_each_class_has_a_sequence_of_its_own() -> None:
    sequences = [CaseRounds(6, class_number=number) for number in (None, 1, 2)]
    assert len({tuple(rounds.index(0, n) for n in range(24)) for rounds in sequences}) == 3


@pytest.mark.parametrize("weights", [[1, 1, 1, 2.5, 4.5], [0.2, 0.2, 9.6], [3.0, 1.0]])
def test_a_round_has_each_index_by_weight_to_within_one(weights: list[float]) -> None:
    count, shares = len(weights), np.array(weights) / sum(weights)
    total: Counter[int] = Counter()
    for seed in range(300):
        order = shuffled(np.random.default_rng(seed), count, np.array(weights))
        drawn = Counter(order.tolist())
        assert len(order) == count
        assert all(abs(drawn[index] - count * share) < 1 for index, share in enumerate(shares))
        total += drawn
    for index, share in enumerate(shares):
        assert total[index] / (300 * count) == pytest.approx(share, abs=0.03)
