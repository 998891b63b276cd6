"""medconv/targets/region_checks.py: an order has one value of each region."""

import pytest
from helpers.volumes import edit_json, write_nnunet

from medconv.data.datasets.dataset_json import nnunet

REGIONS = {"background": 0, "lesion": [1, 2], "small": 2, "ignore": 3}


@pytest.mark.parametrize("order", [[[1], [2]], ["1", "2"], "12", 1])
def test_an_order_without_one_value_per_region_is_refused(tmp_path, order):
    root = edit_json(write_nnunet(tmp_path), labels=REGIONS, regions_class_order=order)
    with pytest.raises(
        ValueError, match=r"regions_class_order must give each of \['lesion', 'small'\] a label value"
    ):
        nnunet(root)
