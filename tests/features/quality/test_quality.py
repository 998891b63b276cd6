"""medconv/features/quality/quality.py: agreement of label maps, and the entropy of probabilities."""

import numpy as np
import pytest
import torch

from medconv.features.quality.quality import (
    agreement,
    calibrated,
    confidence,
    expected,
    read_calibration,
    soft_dice_sums,
    uncertainty,
)
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets

CLASSES = LabelMapTargets.of_classes(("background", "a", "b", "c"))


def label_map(ones, twos=0):
    values = np.zeros(20, np.int16)
    values[:ones], values[10 : 10 + twos] = 1, 2
    return values.reshape(5, 4, 1)


def test_agreement_is_over_all_pairs_of_networks():
    """One network of three finds class b: its two pairs have Dice 0, the third pair has none."""
    result = agreement([label_map(4), label_map(6), label_map(8, 2)], CLASSES, 500.0)
    assert result["networks"] == 3
    a, b, c = (result["classes"][name] for name in "abc")
    assert a == {
        "dice": pytest.approx((8 / 10 + 8 / 12 + 12 / 14) / 3),
        "lowest_dice": pytest.approx(8 / 12),
        "volume_ml": pytest.approx(3.0),
        "volume_sd_ml": pytest.approx(1.0),
    }
    assert (b["dice"], b["lowest_dice"]) == (0.0, 0.0) and b["volume_ml"] == pytest.approx(1 / 3)
    assert c == {"dice": None, "lowest_dice": None, "volume_ml": 0.0, "volume_sd_ml": 0.0}


def test_one_network_is_as_sure_as_the_soft_dice_with_its_own_label_map():
    """Also slab by slab; 1 where nothing is in doubt, and undefined for a class that it does not find."""
    logits = torch.randn(4, 5, 4, 1, generator=torch.Generator().manual_seed(0))
    logits[3] = -9
    label, probabilities = logits.argmax(0), logits.softmax(0)
    sums = sum(
        soft_dice_sums(probabilities[:, slab], label[slab], CLASSES) for slab in (slice(2), slice(2, 5))
    )
    result = confidence(label.numpy(), sums, CLASSES, 500.0)
    assert (result["networks"], result["method"]) == (1, "soft_dice_confidence")
    for value, name in ((1, "a"), (2, "b")):
        mask = label == value
        expected_dice = 2 * probabilities[value][mask].sum() / (probabilities[value].sum() + mask.sum())
        assert result["classes"][name]["dice"] == pytest.approx(float(expected_dice))
        assert result["classes"][name]["volume_ml"] == pytest.approx(float(mask.sum()) / 2)
    assert result["classes"]["c"] == {"dice": None, "volume_ml": 0.0}
    sure = soft_dice_sums((100 * logits).softmax(0), label, CLASSES)
    assert confidence(label.numpy(), sure, CLASSES, 1.0)["classes"]["a"]["dice"] == pytest.approx(1, abs=0.02)
    regions = RegionTargets(("whole", "core"), ((1, 2), (2,)), None, (1, 2))
    sums = soft_dice_sums(probabilities[1:3], label, regions)
    assert sums[0, 0] == pytest.approx(float(probabilities[1][(label == 1) | (label == 2)].sum()))


def test_the_expected_dice_is_on_the_line_and_between_0_and_1():
    assert expected(0.5, (0.5, 0.3)) == pytest.approx(0.55)
    assert (expected(1.0, (2.0, -0.5)), expected(0.1, (2.0, -0.5))) == (1.0, 0.0)
    assert expected(None, (1.0, 0.0)) is None and expected(0.5, None) is None
    result = calibrated({"classes": {"a": {"dice": 0.5}, "b": {"dice": 0.5}}}, {"a": (1.0, 0.25), "b": None})
    assert [result["classes"][name]["expected_dice"] for name in "ab"] == [0.75, None]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"mean": 1}', '{"quality": {"per_class": {"a": {"calibration": [1]}}}}']
)
def test_a_file_without_calibration_is_refused(tmp_path, content):
    path = tmp_path / "metrics.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="metrics.json: has no calibration for a; expected"):
        read_calibration(path, ["a"])


def test_regions_are_unions_of_values():
    regions = RegionTargets(("whole", "core"), ((1, 2), (2,)), None, (1, 2))
    classes = agreement([label_map(4, 2), label_map(4, 1)], regions, 1.0)["classes"]
    assert classes["whole"]["dice"] == pytest.approx(2 * 5 / 11)
    assert classes["core"]["dice"] == pytest.approx(2 / 3)


def test_uncertainty_of_classes_is_their_entropy():
    probabilities = torch.tensor([[1.0, 0.25, 0.5], [0.0, 0.25, 0.5], [0.0, 0.25, 0.0], [0.0, 0.25, 0.0]])
    assert uncertainty(iter(probabilities), 4, True).tolist() == pytest.approx([0.0, 1.0, 0.5])


def test_uncertainty_of_regions_is_that_of_the_least_certain():
    probabilities = torch.tensor([[1.0, 0.5, 0.9], [0.0, 0.1, 0.5]])
    assert uncertainty(iter(probabilities), 2, False).tolist() == pytest.approx([0.0, 1.0, 1.0])
    assert float(uncertainty(torch.tensor([[0.1]]), 1, False)) == pytest.approx(0.4689956)
