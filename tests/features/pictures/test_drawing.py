"""medconv/features/pictures/drawing.py: planes, orientation, sizes and colours in a picture of a case."""

import io

import numpy as np
import pytest
from PIL import Image
from reference.planes import planes_of_most_foreground

from medconv.data.io.grids import to_canonical
from medconv.data.io.images import read_label
from medconv.features.pictures import drawing
from medconv.features.pictures.drawing import heat, overlay, png

GAP = 4
ORANGE, BLUE = np.array([230, 159, 0]), np.array([86, 180, 233])


def runs(filled):
    """Stretches of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], filled.astype(int), [0]])))
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def panels(picture):
    """Rows of panels, by the black gaps between them; nothing within an image may be black for this."""
    rows = [picture[rows] for rows in runs(picture.any(axis=(1, 2)))]
    return [[row[:, columns] for columns in runs(row.any(axis=(0, 2)))] for row in rows]


def bright_image(shape):
    """Not black anywhere but in one corner voxel, which sets the scale."""
    image = np.full(shape, 100.0)
    image.flat[0] = 1000.0
    return image + np.random.default_rng(0).uniform(0, 100, shape)


def coloured(panel, bare):
    return (panel != bare).any(axis=2)


def centre(mask):
    """(right, up) as shares of the panel's width and height."""
    rows, columns = np.nonzero(mask)
    return (columns.mean() + 0.5) / mask.shape[1], 1 - (rows.mean() + 0.5) / mask.shape[0]


@pytest.mark.parametrize(
    ("shape", "spacing", "sizes_mm"),
    [
        ((20, 20, 5), (1.0, 1.0, 4.0), [(20, 20), (20, 20), (20, 20)]),
        ((10, 20, 5), (2.0, 1.0, 8.0), [(20, 20), (20, 40), (20, 40)]),
        ((64, 32, 16), (0.5, 0.5, 0.5), [(32, 16), (32, 8), (16, 8)]),
        ((16, 8), (1.0, 5.0), [(16, 40)]),
        ((300, 10), (1.0, 3.0), [(300, 30)]),
    ],
)
def test_pixels_are_square_in_mm(shape, spacing, sizes_mm):
    picture = overlay(np.full(shape, 1.0) + bright_image(shape), [np.zeros(shape, np.uint8)], spacing)
    scales = [max(160 / max(size_mm), 1 / min(spacing)) for size_mm in sizes_mm]
    sizes = [(round(w * scale), round(h * scale)) for (w, h), scale in zip(sizes_mm, scales, strict=True)]
    column = max(width for width, _ in sizes)
    assert picture.shape[1] == 2 * column + GAP
    top = 0
    for width, height in sizes:
        assert max(width, height) >= 160
        bare, painted = columns_of(picture[top : top + height], column)
        assert (bare == painted).all()  # without a label
        left = (column - width) // 2  # in the middle of its column
        panel = bare[:, left : left + width]
        assert panel[:, 0].any() and panel[:, -1].any() and panel[-1].any() and panel[0].any()
        assert not bare[:, :left].any() and not bare[:, left + width :].any()
        top += height + GAP
    assert picture.shape[0] == top - GAP


def columns_of(row, width):
    """The two panels of a row, which are this wide with their black borders."""
    assert not row[:, width : width + GAP].any()
    return row[:, :width], row[:, width + GAP :]


@pytest.mark.parametrize("voxel", [(1, 6), (0, 0), (7, 5)])
def test_2d_right_is_left_as_in_pictures_and_anterior_is_up(voxel):
    shape, spacing = (10, 8), (1.0, 2.0)
    label = np.zeros(shape, np.uint8)
    label[voxel] = 1
    [[bare, painted]] = panels(overlay(500 + bright_image(shape), [label], spacing))
    right, anterior = [(v + 0.5) / n for v, n in zip(voxel, shape, strict=True)]
    assert centre(coloured(painted, bare)) == pytest.approx((1 - right, anterior), abs=0.01)


@pytest.mark.parametrize("voxel", [(1, 6, 4), (7, 1, 0)])
def test_3d_planes_pass_through_the_foreground_and_superior_is_up(voxel):
    shape, spacing = (10, 8, 5), (1.0, 1.0, 3.0)
    image, label = np.full(shape, 300.0), np.zeros(shape, np.uint8)
    image[0], image[voxel] = 200.0, 900.0
    label[voxel] = 1
    image += np.random.default_rng(0).uniform(0, 20, shape)
    picture = overlay(image, [label], spacing)
    row = 0
    column = (picture.shape[1] - GAP) // 2
    for right, up in [(0, 1), (0, 2), (1, 2)]:  # axial, coronal, sagittal: axis to the right, axis up
        size = shape[right] * spacing[right], shape[up] * spacing[up]
        scale = max(160 / max(size), 1)
        width, height = (round(mm * scale) for mm in size)
        left = (column - width) // 2
        bare, painted = (
            panel[:, left : left + width] for panel in columns_of(picture[row : row + height], column)
        )
        place = [(voxel[axis] + 0.5) / shape[axis] for axis in (right, up)]
        assert centre(coloured(painted, bare)) == pytest.approx(place, abs=0.02)
        assert centre(bare[..., 0] > 250) == pytest.approx(place, abs=0.02)
        row += height + GAP


def test_the_plane_of_most_foreground_of_the_first_label_map_is_shown():
    reference, prediction = np.zeros((2, 6, 6, 6), np.uint8)
    reference[2:4, 2:4, 4] = 1
    reference[0, 0, 1] = 1
    prediction[:, :, 1] = 2
    prediction[5, 5, 4] = 2
    picture = overlay(500 + bright_image((6, 6, 6)), [reference, prediction], (1.0, 1.0, 1.0))
    bare, first, second = (picture[:160, i * 164 : i * 164 + 160] for i in range(3))
    assert coloured(first, bare).mean() == pytest.approx(4 / 36, abs=0.01)
    assert coloured(second, bare).mean() == pytest.approx(1 / 36, abs=0.01)


def test_contours_and_colours_appear_where_the_label_is_and_tell_classes_apart():
    image, label = np.zeros((8, 8)), np.zeros((8, 8), np.uint8)
    label[:4], label[6:] = 1, 2
    picture = overlay(image, [label, (label == 2) * 8], (1.0, 1.0))
    bare, painted, eighth = (picture[:, i * 164 : i * 164 + 160][:, ::-1].astype(int) for i in range(3))
    assert (bare == 0).all()
    assert np.abs(painted[:, :79] - 0.3 * ORANGE).max() <= 1
    assert (painted[:, 79] == ORANGE).all() and (painted[:, 120] == BLUE).all()  # contours, within the class
    assert (painted[:, 80:120] == 0).all()
    assert np.abs(painted[:, 121:] - 0.3 * BLUE).max() <= 1
    assert np.abs(eighth[:, 121:] - 0.3 * ORANGE).max() <= 1  # the colours repeat


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int16, np.float32])
@pytest.mark.parametrize("classes", [0, 1, 3, 105])
def test_planes_are_those_of_a_mask_per_class(classes, dtype):
    """Label values need not be consecutive, and negative ones are background."""
    random = np.random.default_rng(classes)
    values = np.array([0, -1, *range(1, 3 * classes + 1, 3)]).astype(dtype)
    for shape in [(7, 5, 6), (1, 4, 9), (12, 11, 2)]:
        label = random.choice(values, shape, p=None if classes else [1, 0])
        chosen = [(plane.axis, plane.index) for plane in drawing._planes(label)]
        assert chosen == planes_of_most_foreground(label)


def test_intensities_are_stretched_and_a_constant_image_is_black():
    ramp = np.repeat(np.linspace(-5, 3, 100)[:, None], 100, axis=1)
    picture = overlay(ramp, [np.zeros((100, 100), np.uint8)], (1.0, 1.0))
    assert (picture[:, 159] == 0).all() and (picture[:, 0] == 255).all()
    assert np.abs(picture[0, 80].astype(int) - 128).max() < 8
    flat = overlay(np.full((4, 4), 7.0), [np.zeros((4, 4), np.uint8)], (1.0, 1.0))
    assert (flat == 0).all()


def test_a_png_is_read_by_pillow():
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 3), np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(pixels)))), pixels)


def test_heat_lies_at_its_voxel_and_colours_are_kept():
    strength = np.zeros((20, 10), np.float32)
    strength[15, 8] = 1
    image = np.zeros((3, 20, 10))
    image[0, :10], image[2, 10:] = 1, 1  # blue on the left, red on the right
    picture = heat(image, strength, (1.0, 1.0)).astype(int)
    width = (picture.shape[1] - GAP) // 2
    bare, warm = picture[:, :width], picture[:, -width:]
    assert bare[0, 0].tolist() == [0, 0, 255] and bare[0, -1].tolist() == [255, 0, 0]
    rows, columns = np.nonzero((bare != warm).any(2))
    assert (columns.mean() / width, 1 - rows.mean() / len(picture)) == pytest.approx(
        (1 - 15.5 / 20, 8.5 / 10), abs=0.02
    )


def test_a_large_picture_is_made_smaller_and_keeps_its_shape_and_contours():
    label = np.zeros((2000, 1000), np.uint8)
    label[500:1500, 250:750] = 1
    picture = overlay(bright_image((2000, 1000)), [label], (1.0, 1.0))
    assert picture.shape == (256, 2 * 512 + GAP, 3)
    image, painted = picture[:, :512], picture[:, -512:]
    is_contour = (painted == ORANGE).all(axis=2)
    assert is_contour[128 + 63, 128:384].all()  # the lower edge, one pixel wide
    assert centre(coloured(painted, image)) == pytest.approx((0.5, 0.5), abs=0.01)


def test_columns_have_titles_and_the_classes_in_sight_a_legend():
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


def test_a_picture_is_shown_as_viewers_show_its_file(tmp_path):
    corner = np.zeros((4, 6), np.uint8)
    corner[0, 0] = 1  # top left
    Image.fromarray(corner).save(tmp_path / "mask.png")
    top_left, grid = read_label(tmp_path / "mask.png")
    seen, _ = to_canonical(top_left[None], grid)
    shown = overlay(np.zeros((6, 4)), [seen[0, :, :, 0]], (1, 1))
    column = shown[:, -shown.shape[1] // 2 :].max(-1)
    top, left = np.argwhere(column > column.min()).mean(0) / column.shape
    assert top < 0.3
    assert left < 0.3
