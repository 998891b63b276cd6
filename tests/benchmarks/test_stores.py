"""scripts/benchmarks/stores.py: every format reads the box that was written, and files leave the page cache."""

import numpy as np
import pytest

from benchmarks import stores


@pytest.mark.parametrize("name", stores.formats())
@pytest.mark.parametrize("start", [(0, 0, 0), (31, 32, 1), (49, 41, 20)])
def test_a_box_across_blocks_or_at_the_edge_is_read_back(name, start, tmp_path):
    seed = [*name.encode(), *start]  # reused memory must not hold the expected values
    array = np.random.default_rng(seed).normal(size=(2, 70, 65, 40)).astype(np.float32)
    format = stores.formats()[name]
    format.write(tmp_path / "array", array.astype(format.dtype))
    size = (21, 24, 20)
    box = format.read(tmp_path / "array", start, size)
    assert box.dtype == np.float32
    np.testing.assert_array_equal(
        box, stores.box_of(array.astype(format.dtype).astype(np.float32), start, size)
    )
