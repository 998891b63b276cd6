"""medconv/metrics/consensus.py: against votes by hand, and STAPLE against SimpleITK."""

import tracemalloc

import numpy as np
import pytest

from medconv.metrics import consensus


def raters(seed, count=3, num_classes=3):
    """Label maps of raters who err in a share of the voxels that grows with their number."""
    rng = np.random.default_rng(seed)
    true = np.zeros((12, 10, 8), np.int16)
    for value in range(1, num_classes):
        true[2 * value : 2 * value + 4, 2:8, 1:6] = value
    label_maps = []
    for number in range(count):
        is_wrong = rng.random(true.shape) < 0.05 * (number + 1)
        label_maps.append(
            np.where(is_wrong, rng.integers(num_classes, size=true.shape), true).astype(np.int16)
        )
    return label_maps


def test_the_label_of_most_raters_wins_and_the_background_of_two():
    first = np.array([0, 1, 1, 2, 0])
    second = np.array([0, 1, 2, 2, 1])
    third = np.array([0, 1, 2, 0, 2])
    np.testing.assert_array_equal(consensus.majority([first, second]), [0, 1, 1, 2, 0])
    np.testing.assert_array_equal(consensus.majority([first, second, third]), [0, 1, 2, 2, 0])
    np.testing.assert_allclose(
        consensus.shares([first, second, third], 3),
        [[0, 1, 1 / 3, 0, 1 / 3], [0, 0, 2 / 3, 2 / 3, 1 / 3]],
        rtol=1e-6,
    )


def test_memory_for_a_majority_does_not_grow_with_label_values():
    """As those of a brain's regions, to 32767."""
    label_maps = [32767 * (label_map == 2) + 2035 * (label_map == 1) for label_map in raters(0)]
    tracemalloc.start()
    answer = consensus.majority(label_maps)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1000 * label_maps[0].size
    np.testing.assert_array_equal(answer == 32767, consensus.majority(raters(0)) == 2)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_staple_equals_that_of_simpleitk(num_classes):
    sitk = pytest.importorskip("SimpleITK")
    label_maps = raters(1, count=4, num_classes=num_classes)
    undecided = num_classes + 1
    images = [sitk.GetImageFromArray(label_map.astype(np.uint8)) for label_map in label_maps]
    expected = sitk.GetArrayFromImage(sitk.MultiLabelSTAPLE(images, undecided))
    ours = consensus.staple(label_maps)
    assert (expected != undecided).all()
    # Versions of SimpleITK differ in how they begin where votes are equal.
    assert (ours == expected).mean() > 0.999


@pytest.mark.parametrize(("count", "num_classes"), [(14, 30), (10, 105)])
def test_many_raters_and_classes_are_no_limit(count, num_classes):
    """Of their different votes there are more than 64 bits count, of which few occur."""
    rng = np.random.default_rng(0)
    true = rng.integers(0, num_classes, (24, 24, 12)).astype(np.int16)
    label_maps = [
        np.where(rng.random(true.shape) < 0.2, rng.integers(0, num_classes, true.shape), true).astype(
            np.int16
        )
        for _ in range(count)
    ]
    assert (consensus.staple(label_maps) == true).mean() > 0.999


def test_staple_trusts_a_good_rater_more_than_two_bad_ones():
    rng = np.random.default_rng(0)
    true = np.zeros((40, 40), np.int16)
    true[10:30, 10:30] = 1
    bad = [np.where(rng.random(true.shape) < 0.35, 1 - true, true).astype(np.int16) for _ in range(2)]
    good = [np.where(rng.random(true.shape) < 0.02, 1 - true, true).astype(np.int16) for _ in range(2)]
    label_maps = [*good, *bad]
    errors = {name: (method(label_maps) != true).mean() for name, method in consensus.CONSENSUS.items()}
    assert errors["staple"] < errors["majority"]


def test_two_raters_who_disagree_get_no_label_that_neither_gave():
    """Half of the voxels are ties, which some implementations count as a label of their own."""
    first, second = np.array([0, 2, 2, 1]), np.array([0, 2, 1, 2])
    for method in consensus.CONSENSUS.values():
        label = method([first, second])
        assert label[:2].tolist() == [0, 2] and set(label[2:].tolist()) <= {0, 1, 2}
