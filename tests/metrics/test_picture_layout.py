"""medconv/metrics/picture_layout.py: titles of columns and a legend."""

import numpy as np

from medconv.metrics.visualization import overlay

GAP = 4  # pixels
ORANGE = (230, 159, 0)  # of the first class


def test_columns_have_titles_and_the_classes_in_sight_a_legend() -> None:
    image, label = np.full((8, 8), 1.0), np.zeros((8, 8), np.uint8)
    label[:4] = 1
    bare = overlay(image, [label], (1.0, 1.0))
    names = {1: "liver", 2: "tumour"}
    picture = overlay(image, [label], (1.0, 1.0), titles=("image", "label"), names=names)
    text = 16
    assert picture.shape == (text + GAP + 160 + GAP + text, 2 * 160 + GAP, 3)
    assert (picture[text + GAP : text + GAP + 160] == bare).all()
    titles, legend = picture[:text], picture[-text:]
    assert titles[:, :60].any() and titles[:, 164:224].any() and not titles[:, 60:160].any()
    assert (legend[5, :10] == ORANGE).all() and legend[:, 12:50].any()
    assert not legend[:, 60:].any()  # no tumour in sight
    label[4:, :4], label[4:, 4:] = 2, 3
    many = {1: "a long name of a class", 2: "and of another one", 3: "and of a third"}
    wrapped = overlay(image, [label], (1.0, 1.0), names=many)
    assert wrapped.shape == (160 + 2 * (GAP + text), 324, 3)
