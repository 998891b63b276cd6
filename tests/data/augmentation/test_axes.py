import pytest

from medconv.data.augmentation.axes import check_axes, mirrored_axes
from medconv.utils.errors import ArgumentError


def test_all_are_the_spatial_axes() -> None:
    assert mirrored_axes("all", 3) == (0, 1, 2)
    assert mirrored_axes([2, 0], 3) == (2, 0)


@pytest.mark.parametrize("axes", [[0, 0], [3], [-1], [True], "0", 1, None])
def test_other_than_different_spatial_axes_are_refused(axes: object) -> None:
    with pytest.raises(ArgumentError, match=r"^roll must be different spatial axes from 0 to 2, got"):
        check_axes("roll", axes, 3)


def test_the_error_about_mirrored_axes_offers_all() -> None:
    with pytest.raises(ArgumentError, match=r"^mirror_axes must be .*, or `all`, got \[5\]"):
        mirrored_axes([5], 3)
