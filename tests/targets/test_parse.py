"""medconv/targets/parse.py: classes, regions and the value to ignore, of a dataset.json and of a config."""

from pathlib import Path
from typing import Any

import pytest
from helpers.volumes import edit_json, write_msd, write_nnunet

from medconv.data.datasets.common import targets_of
from medconv.data.datasets.decathlon import msd
from medconv.data.datasets.nnunet import nnunet
from medconv.targets.regions import RegionTargets

REGIONS = {"background": 0, "lesion": [1, 2], "small": 2, "ignore": 3}


def test_regions_and_ignore_of_an_nnunet_dataset(tmp_path: Path) -> None:
    root = edit_json(write_nnunet(tmp_path), labels=REGIONS, regions_class_order=[1, 2])
    dataset = nnunet(root)
    assert dataset.class_names == ("background", "label 1", "small")
    targets = RegionTargets(("lesion", "small"), ((1, 2), (2,)), 3, (1, 2))
    assert dataset.targets == targets == targets_of(root)


@pytest.mark.parametrize(
    "labels", [{"0": "background", "1": "big", "5": "ignore"}, {"background": 0, "big": 1, "ignore": 5}]
)
def test_ignore_is_a_value_and_not_a_class(tmp_path: Path, labels: dict[str, Any]) -> None:
    write, read = (write_msd, msd) if "0" in labels else (write_nnunet, nnunet)
    dataset = read(edit_json(write(tmp_path), labels=labels))
    assert dataset.class_names == ("background", "big")
    assert dataset.targets.ignore == 5


@pytest.mark.parametrize(
    "labels", [{**REGIONS, "small": 2_000_000_000}, {**REGIONS, "ignore": 2_000_000_000}]
)
def test_label_values_above_16_bits_are_refused(tmp_path: Path, labels: dict[str, Any]) -> None:
    root = edit_json(write_nnunet(tmp_path), labels=labels, regions_class_order=[1, 2])
    with pytest.raises(
        ValueError, match=r"dataset\.json: label values must lie in 0 to 32767, got {'\w+': 2000000000}"
    ):
        nnunet(root)
