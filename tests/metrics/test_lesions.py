"""medconv/metrics/lesions.py: connected components, matched one to one by their overlap."""

from itertools import permutations, product

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from medconv.metrics.lesions import Lesions, match


def components(mask):
    """Voxels that touch by a face, an edge or a corner; the slow version."""
    left = {tuple(place) for place in np.argwhere(mask).tolist()}
    found = []
    while left:
        part, edge = set[tuple[int, ...]](), [left.pop()]
        while edge:
            place = edge.pop()
            part.add(place)
            for step in product((-1, 0, 1), repeat=mask.ndim):
                near = tuple(p + s for p, s in zip(place, step, strict=True))
                if near in left:
                    left.remove(near)
                    edge.append(near)
        found.append(part)
    return found


def best_pairing(prediction, reference, iou):
    """Predicted and reference lesions, the largest sum of overlaps and its matches, of all pairings."""
    ours, theirs = components(prediction), components(reference)
    few, many = sorted((ours, theirs), key=len)
    best = (0.0, 0)
    for order in permutations(many, len(few)):
        overlaps = [len(a & b) / len(a | b) for a, b in zip(few, order, strict=True)]
        kept = [overlap for overlap in overlaps if overlap >= iou]
        best = max(best, (sum(kept), len(kept)))
    return len(ours), len(theirs), *best


@pytest.mark.parametrize("iou", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("shape", [(14, 12), (9, 8, 7)])
def test_matches_equal_the_slow_implementation(shape, iou):
    contested = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        field = gaussian_filter(rng.normal(size=shape), 1.0)
        other = field + 0.7 * gaussian_filter(rng.normal(size=shape), 0.7)
        a, b = field > np.quantile(field, 0.8), other > np.quantile(other, 0.75)
        if min(len(components(a)), len(components(b))) > 5 or max(map(len, map(components, (a, b)))) > 8:
            continue
        found = match(a, b, iou)
        predicted, reference, total, matches = best_pairing(a, b, iou)
        assert (found.predicted, found.reference, len(found.overlaps)) == (predicted, reference, matches)
        assert sum(found.overlaps) == pytest.approx(total)
        contested += 0 < matches < max(predicted, reference)
    assert contested > 1


def test_scores_are_counted_over_lesions():
    """F1 is 2 x matches over both counts; panoptic quality weighs matches by their overlap."""
    lesions = Lesions(3, 2, (0.5, 0.9))
    assert lesions.f1 == pytest.approx(4 / 5)
    assert lesions.panoptic_quality == pytest.approx(2 * 1.4 / 5)
