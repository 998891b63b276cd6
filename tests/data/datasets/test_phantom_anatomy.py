"""medconv/data/datasets/phantom_anatomy.py: shapes and labels; `test_phantom.py` reads whole datasets."""

import numpy as np
import pytest

from medconv.data.datasets.phantom_anatomy import LABELS, draw_anatomy, draw_grid, draw_image


@pytest.mark.parametrize("spatial_dims", [2, 3])
def test_every_tissue_lies_on_the_grid_and_the_image_shows_it(spatial_dims: int) -> None:
    rng = np.random.default_rng(0)
    points_mm, affine = draw_grid(rng, spatial_dims)
    tissue = draw_anatomy(rng, points_mm)
    image = draw_image(rng, tissue, points_mm)
    assert points_mm.shape == (spatial_dims, *tissue.shape) and image.shape == tissue.shape
    steps_mm = [np.diff(points_mm[axis], axis=axis) for axis in range(spatial_dims)]
    for axis, step_mm in enumerate(steps_mm):
        np.testing.assert_allclose(step_mm, affine[axis, axis])
    assert set(range(1, len(LABELS) - 1)) <= set(np.unique(tissue))  # the lesion may be absent
    assert image[tissue == 0].mean() < image[tissue == LABELS.index("large_organ")].mean()
