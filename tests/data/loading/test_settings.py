"""medconv/data/loading/settings.py: numbers out of range are named."""

from typing import Any

import pytest

from medconv.data.loading.settings import LoaderSettings
from medconv.utils.errors import ArgumentError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, r"batch_size must be at least 1, got 0"),
        ({"samples_per_epoch": 0}, r"samples_per_epoch must be at least 1, got 0"),
        ({"prefetch_factor": 0}, r"prefetch_factor must be at least 1, got 0"),
        ({"num_workers": -1}, r"num_workers must be 0 or more, got -1"),
        ({"num_workers": 0, "persistent_workers": True}, r"persistent_workers=true.*got num_workers=0"),
    ],
)
def test_invalid_values_are_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        LoaderSettings(**{"batch_size": 2, "samples_per_epoch": 6, **changes})
