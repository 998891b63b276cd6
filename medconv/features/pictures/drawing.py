"""Pictures of a case: image, reference and prediction side by side, in planes through the foreground."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from medconv.data.io.raster import COLOURS, colour

_RGB = np.array([ImageColor.getrgb(colour) for colour in COLOURS], float)
_RED = _RGB[5]
_YELLOW = _RGB[3]
_PANEL_PIXELS = 160  # minimum of the longer side of a panel
_MAX_PANEL_PIXELS = 512  # a picture of 2048 x 2048 in full took 3.4 MB in each validation
_PLAIN_GREY = 60.0  # from 0 to 255: behind labels without an image
_FILL_OPACITY = 0.3  # of a class's colour within its contour
_HEAT_OPACITY = 0.6  # of a saliency map where it is 1
GAP_PIXELS = 4  # between panels
_TEXT_PIXELS = 12  # height of the font
_BLOCK_PIXELS = 10  # side of the block of colour before a word of the legend


@dataclass(frozen=True)
class _Plane:
    """A plane of voxels. Args: axis: perpendicular to the plane; None: a 2D image, which is one plane."""

    axis: int | None
    index: int

    def cut(self, array: np.ndarray) -> np.ndarray:
        if self.axis is None:
            return array
        plane: np.ndarray = np.take(array, self.index, self.axis)
        return plane


def overlay(
    image: np.ndarray | None,
    labels: Sequence[np.ndarray],
    spacing_mm: Sequence[float],
    focus: np.ndarray | None = None,
    titles: Sequence[str] = (),
    names: Mapping[int, str] | None = None,
) -> np.ndarray:
    """One row per plane; one column for the image, if there is one, and one per label map, with contours.

    Shape: image (*spatial), each label (*spatial), 2 or 3 axes (right, anterior, superior) -> (height, width,
    3) uint8. The planes cross where `focus`, or else the first label map, has most foreground, a small class
    counting as much as a large one. Superior, or anterior, is up; right is to the right in planes of volumes,
    and to the left in 2D images, as pictures and DICOM show it. Pixels are square in mm.

    Args:
        titles: of the columns, above the first row.
        names: of label values; those that are visible make a legend.
    """
    rows = []
    visible_values: set[int] = set()
    for plane in _planes(labels[0] if focus is None else focus):
        label_planes = [plane.cut(label) for label in labels]
        for label_plane in label_planes:
            visible_values.update(int(value) for value in np.unique(label_plane))
        image_plane = None if image is None else plane.cut(image)
        rows.append(_overlay_row(image_plane, label_planes, plane.axis, spacing_mm))
    page = grid(rows)
    if titles:
        page = stacked([title_line(titles, page.shape[1]), page])
    legend = []
    for value, name in (names or {}).items():
        if value in visible_values:
            legend.append((name, colour(value)))
    legend_lines = wrapped(legend, page.shape[1])
    return stacked([page, *(text_line(words) for words in legend_lines)])


def heat(image: np.ndarray, strength: np.ndarray | None, spacing_mm: Sequence[float]) -> np.ndarray:
    """One row per plane: the image, and the image under a saliency map from red to yellow.

    Without a map (None) only the image, in its middle planes.

    Shape: image (channels, *spatial), strength (*spatial) from 0 to 1 -> (height, width, 3) uint8. Three
    channels of a 2D image are red, green and blue; otherwise the first channel is shown. The planes cross
    where the map is highest.
    """
    focus = np.zeros(image.shape[1:], bool)
    if strength is not None:
        focus = (strength > 0) & (strength == strength.max())
    rows = []
    for plane in _planes(focus):
        is_rgb = len(image) == 3 and plane.axis is None
        shown_channels = image if is_rgb else image[:1]
        pixels = _shaded(np.stack([plane.cut(channel) for channel in shown_channels], -1))
        panels = [pixels]
        if strength is not None:
            panels.append(_warmed(pixels, plane.cut(strength)[..., None]))
        rows.append([_upright(panel, plane.axis, spacing_mm) for panel in panels])
    return grid(rows)


def png(pixels: np.ndarray) -> bytes:
    """Shape: (height, width, 3) uint8."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def _planes(label: np.ndarray) -> list[_Plane]:
    """The plane across each axis that holds most foreground; one plane for a 2D image.

    Each class counts by its share of voxels in the plane, so that a lesion is not lost beside its organ.
    """
    if label.ndim == 2:
        return [_Plane(None, 0)]
    counts_by_axis = _foreground_counts(label)
    planes = []
    for axis in (2, 1, 0):  # axial, coronal, sagittal
        counts = counts_by_axis[axis]
        if len(counts) == 0:
            planes.append(_Plane(axis, label.shape[axis] // 2))
            continue
        plane_voxels = label.size // label.shape[axis]
        class_share = counts.sum(1, keepdims=True) / label.size
        relative_share = (counts / plane_voxels) / class_share
        foreground = sum(relative_share)  # class after class: another order rounds differently
        planes.append(_Plane(axis, int(np.argmax(foreground))))
    return planes


def _foreground_counts(label: np.ndarray) -> list[np.ndarray]:
    """Voxels of each foreground class in each plane: for each of the three axes, (classes, planes).

    One pass over the slices of the first axis. A mask per class would take classes * voxels bytes.
    """
    values = np.unique(label)
    counts = [np.zeros((size, len(values)), int) for size in label.shape]
    # One bin for each row (or column) of a slice and each class.
    row_offset = len(values) * np.arange(label.shape[1])[:, None]
    column_offset = len(values) * np.arange(label.shape[2])
    for index, label_slice in enumerate(label):
        class_index = np.searchsorted(values, label_slice)
        row_counts = _histogram(class_index + row_offset, counts[1].shape)
        column_counts = _histogram(class_index + column_offset, counts[2].shape)
        counts[0][index] = row_counts.sum(0)
        counts[1] += row_counts
        counts[2] += column_counts
    return [axis_counts[:, values > 0].T for axis_counts in counts]


def _histogram(bins: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """How often each bin occurs; `shape` has as many elements as there are bins."""
    counts = np.bincount(bins.ravel(), minlength=math.prod(shape))
    return counts.reshape(shape)


def _overlay_row(
    image_plane: np.ndarray | None,
    label_planes: Sequence[np.ndarray],
    axis: int | None,
    spacing_mm: Sequence[float],
) -> list[np.ndarray]:
    """The panels of a plane."""
    if image_plane is None:
        grey = np.full((*label_planes[0].shape, 3), _PLAIN_GREY)
    else:
        grey = _shaded(image_plane[..., None])
    background = _upright(grey, axis, spacing_mm)
    panels = [] if image_plane is None else [background]
    for label_plane in label_planes:
        panels.append(_painted(background, _upright(label_plane, axis, spacing_mm)))
    return panels


def _shaded(plane: np.ndarray) -> np.ndarray:
    """(width, height, 1 or 3) -> (width, height, 3), from 0 to 255."""
    low, high = np.percentile(plane, [1, 99])
    intensity_range = max(float(high - low), 1e-8)
    scaled = ((plane - low) / intensity_range).clip(0, 1) * 255
    return np.broadcast_to(scaled, (*plane.shape[:2], 3))


def _painted(grey: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Pixels and their label values -> pixels, with a contour within the edge of each class."""
    padded = np.pad(label, 1, mode="edge")
    left = padded[:-2, 1:-1]
    right = padded[2:, 1:-1]
    below = padded[1:-1, :-2]
    above = padded[1:-1, 2:]
    is_edge = np.any([label != neighbour for neighbour in (left, right, below, above)], axis=0)
    opacity = np.where(is_edge, 1.0, _FILL_OPACITY)
    opacity = (opacity * (label > 0))[..., None]  # background stays grey
    class_rgb = _RGB[(label.astype(int) - 1) % len(_RGB)]
    pixels: np.ndarray = (1 - opacity) * grey + opacity * class_rgb
    return pixels


def _warmed(pixels: np.ndarray, strength: np.ndarray) -> np.ndarray:
    heat_rgb = (1 - strength) * _RED + strength * _YELLOW
    opacity = _HEAT_OPACITY * strength
    warm: np.ndarray = pixels * (1 - opacity) + opacity * heat_rgb
    return warm


def _upright(panel: np.ndarray, axis: int | None, spacing_mm: Sequence[float]) -> np.ndarray:
    """Second axis up, with square pixels: some are repeated, or skipped if it is large.

    The first axis goes to the right, of a 2D image to the left.
    Args:
        axis: perpendicular to the plane of the panel; None: a 2D image.
    """
    pixel_mm = [mm for spatial_axis, mm in enumerate(spacing_mm) if spatial_axis != axis]
    # A panel may have a third axis, of colours, which has no size in mm.
    size_mm = [pixels * mm for pixels, mm in zip(panel.shape, pixel_mm, strict=False)]
    longest_mm = max(size_mm)
    all_pixels_per_mm = max(_PANEL_PIXELS / longest_mm, 1 / min(pixel_mm))
    pixels_per_mm = min(_MAX_PANEL_PIXELS / longest_mm, all_pixels_per_mm)
    source_index = []
    for mm, voxels in zip(size_mm, panel.shape, strict=False):
        pixels = mm * pixels_per_mm
        position = np.arange(max(1, round(pixels))) / pixels
        source_index.append((position * voxels).astype(int).clip(0, voxels - 1))
    upright: np.ndarray = panel[np.ix_(*source_index)].swapaxes(0, 1)[::-1]
    return upright[:, ::-1] if axis is None else upright


@dataclass(frozen=True)
class Word:
    """A word on a line of text.

    Args:
        text: may hold blanks.
        block_colour: of a block before the word; None: no block.
        left: where it begins, in pixels.
    """

    text: str
    block_colour: str | None
    left: int

    @property
    def width(self) -> int:
        """In pixels, with its block."""
        return _word_width(self.text, self.block_colour)


def title_line(titles: Sequence[str], page_width: int) -> np.ndarray:
    column_width = (page_width + GAP_PIXELS) / len(titles)
    words = []
    for column, title in enumerate(titles):
        words.append(Word(title, block_colour=None, left=round(column * column_width)))
    return text_line(words)


def text_line(words: Sequence[Word]) -> np.ndarray:
    """A line of white text on black. Shape: (height, width, 3)."""
    width = max(word.left + word.width for word in words)
    line = Image.new("RGB", (width, _TEXT_PIXELS + 4))
    pen = ImageDraw.Draw(line)
    font = ImageFont.load_default(_TEXT_PIXELS)
    for word in words:
        left = word.left
        if word.block_colour is not None:
            block = (left, 3, left + _BLOCK_PIXELS - 1, 2 + _BLOCK_PIXELS)
            pen.rectangle(block, word.block_colour)
            left += _BLOCK_PIXELS + GAP_PIXELS
        pen.text((left, 1), word.text, "white", font)
    return np.asarray(line)


def wrapped(legend: Sequence[tuple[str, str]], max_width: int) -> list[list[Word]]:
    """Names and their colours, broken into lines of at most so many pixels, if no name is longer."""
    lines: list[list[Word]] = []
    left = max_width  # so that the first name begins a line
    for name, block_colour in legend:
        width = _word_width(name, block_colour)
        if left + width > max_width:
            lines.append([])
            left = 0
        lines[-1].append(Word(name, block_colour, left))
        left += width + _TEXT_PIXELS
    return lines


def _word_width(text: str, block_colour: str | None) -> int:
    block_width = 0 if block_colour is None else _BLOCK_PIXELS + GAP_PIXELS
    font = ImageFont.load_default(_TEXT_PIXELS)
    return block_width + math.ceil(font.getlength(text)) + 1


def stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Pictures below each other, padded by black on the right."""
    width = max(row.shape[1] for row in rows)
    padded_rows = []
    for row in rows:
        missing = width - row.shape[1]
        padded_rows.append(np.pad(row, ((0, 0), (0, missing), (0, 0))))
    return _joined(padded_rows, 0)


def grid(rows: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Rows of panels in columns of one width; narrower panels are in the middle of theirs."""
    width = max(panel.shape[1] for row in rows for panel in row)
    return stacked([_joined([_centred(panel, width) for panel in row], 1) for row in rows])


def _centred(panel: np.ndarray, width: int) -> np.ndarray:
    left = (width - panel.shape[1]) // 2
    right = width - panel.shape[1] - left
    return np.pad(panel, ((0, 0), (left, right), (0, 0)))


def _joined(panels: Sequence[np.ndarray], axis: int) -> np.ndarray:
    gap_shape = list(panels[0].shape)
    gap_shape[axis] = GAP_PIXELS
    pieces = [panels[0]]
    for panel in panels[1:]:
        pieces += [np.zeros(gap_shape, np.uint8), panel]
    return np.concatenate(pieces, axis).astype(np.uint8)
