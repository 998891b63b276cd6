from typing import get_args

import pytest
import torch
from lightning.fabric.connector import _PRECISION_INPUT

from medconv.config.schema import MATMUL_PRECISIONS, PRECISIONS


def test_precisions_are_those_of_lightning_and_auto():
    of_lightning = {str(name) for group in get_args(_PRECISION_INPUT) for name in get_args(group)}
    assert set(PRECISIONS) == {"auto", *of_lightning}


@pytest.mark.parametrize("name", MATMUL_PRECISIONS)
def test_torch_knows_each_precision_of_products(name):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(name)
        assert torch.get_float32_matmul_precision() == name
    finally:
        torch.set_float32_matmul_precision(before)
