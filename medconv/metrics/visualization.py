"""Pictures of a case: image, reference and prediction side by side, in planes through the foreground."""

import io
import math
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

# Okabe & Ito's colours, which colour-blind readers can tell apart.
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
_RGB = np.array([ImageColor.getrgb(colour) for colour in _COLOURS], float)
_PANEL = 160  # pixels along the longer side of a panel, at least
_PLAIN = 60.0  # grey behind labels without an image
_GAP = 4  # pixels between panels
_FILL = 0.3  # share of a class's colour within its contour
_TEXT, _BLOCK = 12, 10  # pixels: of a line of text, and of a block of colour before a word


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
    counting as much as a large one. Superior, or anterior, is up; pixels are square in mm.
    Args: titles: of the columns, above the first row. names: of label values; those in sight are a legend.
    """
    rows, in_sight = [], set()
    for axis, index in _planes(labels[0] if focus is None else focus):
        cuts = [_cut(label, axis, index) for label in labels]
        if image is None:
            grey = np.full((*cuts[0].shape, 3), _PLAIN)
        else:
            grey = _shaded(_cut(image, axis, index)[..., None])
        grey, *upright = (_upright(panel, axis, spacing_mm) for panel in (grey, *cuts))
        painted = [_painted(grey, label) for label in upright]
        rows.append(_join(painted if image is None else [grey, *painted], 1))
        in_sight |= {int(value) for cut in cuts for value in np.unique(cut)}
    page = _page(rows)
    if titles:
        step = (rows[0].shape[1] + _GAP) / len(titles)
        page = _page([_text([(title, None, round(i * step)) for i, title in enumerate(titles)]), page])
    legend = [(name, colour(value)) for value, name in (names or {}).items() if value in in_sight]
    return _page([page, *(_text(line) for line in _lines(legend, page.shape[1]))])


def heat(image: np.ndarray, strength: np.ndarray | None, spacing_mm: Sequence[float]) -> np.ndarray:
    """One row per plane: the image, and the image under a saliency map from red to yellow.

    Without a map (None) only the image, in its middle planes.

    Shape: image (channels, *spatial), strength (*spatial) from 0 to 1 -> (height, width, 3) uint8. Three
    channels of a 2D image are red, green and blue; otherwise the first channel is shown. The planes cross
    where the map is highest.
    """
    rows = []
    focus = np.zeros(image.shape[1:], bool)
    if strength is not None:
        focus = (strength > 0) & (strength == strength.max())
    for axis, index in _planes(focus):
        colours = len(image) if len(image) == 3 and axis is None else 1
        bare = _shaded(np.stack([_cut(channel, axis, index) for channel in image[:colours]], -1))
        panels = [bare] if strength is None else [bare, _warmed(bare, _cut(strength, axis, index)[..., None])]
        rows.append(_join([_upright(panel, axis, spacing_mm) for panel in panels], 1))
    return _page(rows)


def colour(value: int) -> str:
    """The colour of a label value in HTML notation; seven colours repeat."""
    return _COLOURS[(value - 1) % len(_COLOURS)]


def png(pixels: np.ndarray) -> bytes:
    """Shape: (height, width, 3) uint8."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def _planes(label: np.ndarray) -> list[tuple[int | None, int]]:
    """(axis, index) of the plane across each axis that holds most foreground; one plane for a 2D image.

    Each class counts by its share of voxels in the plane, so that a lesion is not lost beside its organ.
    """
    if label.ndim == 2:
        return [(None, 0)]
    classes = [label == value for value in np.unique(label) if value > 0]
    if not classes:
        return [(axis, label.shape[axis] // 2) for axis in (2, 1, 0)]
    shares = [
        sum(mask.mean(tuple(a for a in range(3) if a != axis)) / mask.mean() for mask in classes)
        for axis in range(3)
    ]
    return [(axis, int(np.argmax(shares[axis]))) for axis in (2, 1, 0)]


def _cut(array: np.ndarray, axis: int | None, index: int) -> np.ndarray:
    return array if axis is None else np.take(array, index, axis)


def _shaded(plane: np.ndarray) -> np.ndarray:
    """(width, height, 1 or 3) -> (width, height, 3), from 0 to 255."""
    low, high = np.percentile(plane, [1, 99])
    scaled = ((plane - low) / max(float(high - low), 1e-8)).clip(0, 1) * 255
    return np.broadcast_to(scaled, (*plane.shape[:2], 3))


def _painted(grey: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Pixels and their label values -> pixels, with a contour within the edge of each class."""
    around = np.pad(label, 1, mode="edge")
    beside = around[:-2, 1:-1], around[2:, 1:-1], around[1:-1, :-2], around[1:-1, 2:]
    is_edge = np.any([label != other for other in beside], axis=0)
    share = np.where(is_edge, 1.0, _FILL)[..., None] * (label[..., None] > 0)
    pixels: np.ndarray = (1 - share) * grey + share * _RGB[(label.astype(int) - 1) % len(_RGB)]
    return pixels


def _warmed(bare: np.ndarray, share: np.ndarray) -> np.ndarray:
    warm: np.ndarray = bare * (1 - 0.6 * share) + 0.6 * share * ((1 - share) * _RGB[5] + share * _RGB[3])
    return warm


def _page(rows: Sequence[np.ndarray]) -> np.ndarray:
    width = max(row.shape[1] for row in rows)
    return _join([np.pad(row, ((0, 0), (0, width - row.shape[1]), (0, 0))) for row in rows], 0)


def _upright(panel: np.ndarray, axis: int | None, spacing_mm: Sequence[float]) -> np.ndarray:
    """First axis to the right, second up, enlarged by repeating pixels until they are square.

    Args: axis: across which the panel was cut.
    """
    pixel_mm = [mm for a, mm in enumerate(spacing_mm) if a != axis]
    size_mm = [n * s for n, s in zip(panel.shape, pixel_mm, strict=False)]
    scale = max(_PANEL / max(size_mm), 1 / min(pixel_mm))
    index = [
        (np.arange(max(1, round(mm * scale))) / (mm * scale) * n).astype(int).clip(0, n - 1)
        for mm, n in zip(size_mm, panel.shape, strict=False)
    ]
    enlarged: np.ndarray = panel[np.ix_(*index)].swapaxes(0, 1)[::-1]
    return enlarged


def _text(words: Sequence[tuple[str, str | None, int]]) -> np.ndarray:
    """A line of words, each with the colour of a block before it, if any, and where it begins.

    Shape: (height, width, 3).
    """
    width = max(x + _length(word, ink) for word, ink, x in words)
    line = Image.new("RGB", (width, _TEXT + 4))
    pen = ImageDraw.Draw(line)
    for word, ink, x in words:
        if ink is not None:
            pen.rectangle((x, 3, x + _BLOCK - 1, 2 + _BLOCK), ink)
            x += _BLOCK + _GAP
        pen.text((x, 1), word, "white", ImageFont.load_default(_TEXT))
    return np.asarray(line)


def _lines(words: Sequence[tuple[str, str]], width: int) -> list[list[tuple[str, str | None, int]]]:
    """Words and their colours, broken into lines of at most so many pixels, if no word is longer."""
    lines: list[list[tuple[str, str | None, int]]] = []
    end = width
    for word, ink in words:
        length = _length(word, ink)
        if end + length > width:
            lines.append([])
            end = 0
        lines[-1].append((word, ink, end))
        end += length + _TEXT
    return lines


def _length(word: str, ink: str | None) -> int:
    block = 0 if ink is None else _BLOCK + _GAP
    return block + math.ceil(ImageFont.load_default(_TEXT).getlength(word)) + 1


def _join(panels: Sequence[np.ndarray], axis: int) -> np.ndarray:
    gap = list(panels[0].shape)
    gap[axis] = _GAP
    parts = [panels[0]]
    for panel in panels[1:]:
        parts += [np.zeros(gap, np.uint8), panel]
    return np.concatenate(parts, axis).astype(np.uint8)
