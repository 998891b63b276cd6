"""Pictures of a case: image, reference and prediction side by side, in planes through the foreground."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageColor

# Okabe & Ito's colours, which colour-blind readers can tell apart.
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
_RGB = np.array([ImageColor.getrgb(colour) for colour in _COLOURS], float)
_PANEL = 160  # pixels along the longer side of a panel, at least
_PLAIN = 60.0  # grey behind labels without an image
_GAP = 4  # pixels between panels


def overlay(
    image: np.ndarray | None,
    labels: Sequence[np.ndarray],
    spacing_mm: Sequence[float],
    focus: np.ndarray | None = None,
) -> np.ndarray:
    """One row per plane; one column for the image, if there is one, and one per label map.

    Shape: image (*spatial), each label (*spatial), 2 or 3 axes (right, anterior, superior) -> (height, width,
    3) uint8. The planes cross where `focus`, or else the first label map, has most foreground. Superior, or
    anterior, is up; pixels are square in mm.
    """
    rows = []
    for axis, index in _planes(labels[0] if focus is None else focus):
        if image is None:
            grey = np.full((*_cut(labels[0], axis, index).shape, 3), _PLAIN)
        else:
            grey = _shaded(_cut(image, axis, index)[..., None])
        painted = [_painted(grey, _cut(label, axis, index)) for label in labels]
        rows.append(_row(painted if image is None else [grey, *painted], axis, spacing_mm))
    return _page(rows)


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
        rows.append(_row(panels, axis, spacing_mm))
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
    """(axis, index) of the plane across each axis that holds most foreground; one plane for a 2D image."""
    if label.ndim == 2:
        return [(None, 0)]
    foreground = label > 0
    if not foreground.any():
        return [(axis, label.shape[axis] // 2) for axis in (2, 1, 0)]
    counts = [foreground.sum(tuple(a for a in range(3) if a != axis)) for axis in range(3)]
    return [(axis, int(counts[axis].argmax())) for axis in (2, 1, 0)]


def _cut(array: np.ndarray, axis: int | None, index: int) -> np.ndarray:
    return array if axis is None else np.take(array, index, axis)


def _shaded(plane: np.ndarray) -> np.ndarray:
    """(width, height, 1 or 3) -> (width, height, 3), from 0 to 255."""
    low, high = np.percentile(plane, [1, 99])
    scaled = ((plane - low) / max(float(high - low), 1e-8)).clip(0, 1) * 255
    return np.broadcast_to(scaled, (*plane.shape[:2], 3))


def _painted(grey: np.ndarray, label: np.ndarray) -> np.ndarray:
    colours = _RGB[(label.astype(int) - 1) % len(_RGB)]
    return np.where(label[..., None] > 0, 0.45 * grey + 0.55 * colours, grey)


def _warmed(bare: np.ndarray, share: np.ndarray) -> np.ndarray:
    warm: np.ndarray = bare * (1 - 0.6 * share) + 0.6 * share * ((1 - share) * _RGB[5] + share * _RGB[3])
    return warm


def _row(panels: Sequence[np.ndarray], axis: int | None, spacing_mm: Sequence[float]) -> np.ndarray:
    """Panels of one plane side by side."""
    pixel = [s for a, s in enumerate(spacing_mm) if a != axis]
    return _join([_upright(panel, pixel) for panel in panels], 1)


def _page(rows: Sequence[np.ndarray]) -> np.ndarray:
    width = max(row.shape[1] for row in rows)
    return _join([np.pad(row, ((0, 0), (0, width - row.shape[1]), (0, 0))) for row in rows], 0)


def _upright(panel: np.ndarray, pixel_mm: Sequence[float]) -> np.ndarray:
    """First axis to the right, second up, enlarged by repeating pixels until they are square."""
    size_mm = [n * s for n, s in zip(panel.shape, pixel_mm, strict=False)]
    scale = max(_PANEL / max(size_mm), 1 / min(pixel_mm))
    index = [
        (np.arange(max(1, round(mm * scale))) / (mm * scale) * n).astype(int).clip(0, n - 1)
        for mm, n in zip(size_mm, panel.shape, strict=False)
    ]
    return panel[np.ix_(*index)].transpose(1, 0, 2)[::-1].astype(np.uint8)


def _join(panels: Sequence[np.ndarray], axis: int) -> np.ndarray:
    gap = list(panels[0].shape)
    gap[axis] = _GAP
    parts = [panels[0]]
    for panel in panels[1:]:
        parts += [np.zeros(gap, np.uint8), panel]
    return np.concatenate(parts, axis)
