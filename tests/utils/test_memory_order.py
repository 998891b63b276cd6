"""medconv/utils/memory_order.py: copies equal NumPy's, and none is made of what is in order."""

import numpy as np
import pytest

from medconv.utils.memory_order import fill, in_c_order


def stored(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    values = np.random.default_rng(0).integers(0, 100, shape, dtype=np.int16)
    if kind == "flipped":
        return values[::-1, ..., ::-1]
    if kind == "turned":
        return values.transpose()
    return np.array(values, order=kind)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("shape", [(5, 6, 7), (3, 9, 35), (5, 6, 1), (1, 6, 7), (5, 6), (0, 3, 4)])
@pytest.mark.parametrize("kind", ["C", "F", "flipped", "turned"])
def test_a_copy_has_the_same_values_in_c_order(kind: str, shape: tuple[int, ...]) -> None:
    source = stored(kind, shape)
    target = np.full(source.shape, np.nan, np.float32)
    fill(target, source)
    np.testing.assert_array_equal(target, source)
    copied = in_c_order(source, np.int32)
    assert copied.flags.c_contiguous and copied.dtype == np.int32
    np.testing.assert_array_equal(copied, source)


def test_an_array_in_order_is_not_copied() -> None:
    source = stored("C", (5, 6, 7))
    assert in_c_order(source) is source and in_c_order(source, np.int16) is source
    assert not np.may_share_memory(in_c_order(source.T), source)
