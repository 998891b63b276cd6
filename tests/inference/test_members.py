"""medconv/inference/predictor.py: networks that give no mean are refused by what differs; see test_predictor too."""

from types import SimpleNamespace

import pytest

from medconv.inference.predictor import check_same


def model(**changes):
    values = {
        "targets": SimpleNamespace(description="label_map: a=1"),
        "class_names": ("background", "a"),
        "modalities": ("T1",),
        "preprocessing": SimpleNamespace(image_dims=3),
        "source_spacing_mm": None,
        "path": "first.ckpt",
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preprocessing": SimpleNamespace(image_dims=2)}, "its images differ: 2D; there 3D"),
        ({"class_names": ("background", "b")}, "its classes differ: background, b; there background, a"),
    ],
)
def test_what_differs_is_named(changes, message):
    with pytest.raises(ValueError, match=f"second.ckpt: cannot be averaged with first.ckpt, {message}"):
        check_same(model(), model(path="second.ckpt", **changes))
