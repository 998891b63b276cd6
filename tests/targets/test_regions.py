"""medconv/targets/regions.py: masks of regions, and label maps from them."""

import torch

from medconv.targets.regions import RegionTargets

REGIONS = RegionTargets(("lesion", "core"), ((1, 2), (2,)), None, (1, 2))


def test_decoding_the_masks_gives_the_label():
    label = torch.randint(3, (2, 1, 5, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    masks = REGIONS.reference(label)
    assert masks.shape == (2, 2, 5, 6)
    assert torch.equal(REGIONS.decode(2 * masks[0] - 1), label[0, 0].to(torch.int16))


def test_a_region_is_where_its_mean_probability_is_above_one_half():
    probabilities = torch.tensor([[0.6, 0.6, 0.4], [0.2, 0.7, 0.5]])
    assert REGIONS.decode_mean(iter(probabilities)).tolist() == [1, 2, 0]


def test_regions_tell_label_values_apart_that_one_of_them_separates():
    assert REGIONS.distinguishes(1, 2) and not RegionTargets(("all",), ((1, 2),), None, (1,)).distinguishes(
        1, 2
    )
