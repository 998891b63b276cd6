"""PNG, JPEG, TIFF and GIF, by Pillow: pictures, masks and clear errors.

A picture is an image of one slice with 1 mm pixels; its position is unknown. The first axis goes from left to
right, the second from bottom to top, like an axial slice with right to the right and anterior up.
"""

import struct
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from medconv.data.io import nifti
from medconv.utils.errors import explained

SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".tif",
    ".tiff",
    ".gif",
    ".PNG",
    ".JPG",
    ".JPEG",
    ".TIF",
    ".TIFF",
    ".GIF",
)
CHANNELS = {1: ("grey",), 3: ("red", "green", "blue")}
_DAMAGED = (  # what Pillow raises for damaged files
    *(OSError, SyntaxError, ValueError, EOFError, LookupError, MemoryError, struct.error, zlib.error),
    Image.DecompressionBombError,
)
_GREY = {"1": np.uint8, "L": np.uint8, "I": np.int32, "F": np.float32}  # by Pillow's mode
_GREY |= dict.fromkeys(("I;16", "I;16L", "I;16B"), np.uint16)
_SAMPLE_FORMAT = 339  # a tag of TIFF: 1 unsigned, 2 signed
_PHOTOMETRIC = 262  # a tag of TIFF: 0 where the lowest value is white
_MIN_SINGLE_VALUE = 100  # a mask with 0 and one such value, for example 255, has one class
_MAX_CLASSES = 64  # a mask with more values is a photograph


def is_picture(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def are_picture_channels(modalities: tuple[str, ...]) -> bool:
    """Whether these modalities are the channels of pictures: grey, or red, green, blue."""
    return tuple(modalities) in CHANNELS.values()


def channels(path: Path) -> int:
    """1 or 3, from the header. Raises: ValueError: as `read`."""
    with _opened(path) as image:
        return 1 if image.mode in (*_GREY, "LA", "La") else 3


def size(path: Path) -> tuple[int, int]:
    """(X, Y) after EXIF rotation, from the header. Raises: ValueError: as `read`."""
    with _opened(path) as image:
        turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
        return (image.height, image.width) if turned else (image.width, image.height)


def read(path: Path) -> np.ndarray:
    """Pixels as displayed: EXIF rotation and palette applied, no alpha.

    Shape: (X, Y, 1) for grey, (X, Y, 1, 3) for colours.
    Raises: ValueError: not PNG, JPEG, TIFF or GIF, damaged, several pages, or partly transparent.
    """
    pixels = _pixels(path, _upright(path))
    return _turned(pixels)[:, :, None]


def read_mask(path: Path) -> np.ndarray:
    """Label values: grey values or palette indices; a single value besides 0, such as 255, is class 1.

    Shape: (X, Y, 1) integers. Raises: ValueError: as `read`; colours, or a photograph.
    """
    image = _upright(path)
    by_index = image.mode == "P" and not _is_grey_gif(path, image)
    pixels = np.asarray(image) if by_index else _pixels(path, image)
    if pixels.ndim == 3:
        if (pixels != pixels[..., :1]).any():
            raise ValueError(
                f"{path}: {_colours(pixels)}, expected a mask of label values: grey 0, 1, 2, ..., 0 and 255, "
                "or a palette"
            )
        pixels = pixels[..., 0]
    values = np.unique(pixels)
    blurred = path.suffix.lower() in (".jpg", ".jpeg")
    if len(values) > (2 if blurred else _MAX_CLASSES):
        also = "; JPEG blurs the values of a mask, PNG keeps them" if blurred else ""
        raise ValueError(
            f"{path}: {len(values)} different values, expected a mask of label values, not a photograph{also}"
        )
    if values[-1] >= _MIN_SINGLE_VALUE and not (values[:-1] != 0).any():
        pixels = (pixels == values[-1]).astype(np.uint8)
    return _turned(pixels)[:, :, None]


def check_ignored(ignore: int | None, masks: Iterable[Path | None]) -> None:
    """Raises: ValueError: a picture, in which `read_mask` may take the value to ignore for class 1."""
    picture = next((path for path in masks if path is not None and is_picture(path)), None)
    if picture is not None and (ignore or 0) >= _MIN_SINGLE_VALUE:
        what = f"as a mask of 0 and {ignore} is read as 0 and 1"
        raise ValueError(f"{picture}: the value to ignore must be below {_MIN_SINGLE_VALUE}, {what}")


def write_mask(path: Path, label: np.ndarray) -> None:
    """A PNG of label values, with 8 bits if they fit. Shape: label (X, Y, 1)."""
    dtype = np.uint8 if label.max(initial=0) < 256 else np.uint16
    rows = np.ascontiguousarray(label.reshape(label.shape[:2]).T[::-1]).astype(dtype)
    Image.fromarray(rows).save(path, format="PNG")


def write_picture(path: Path, pixels: np.ndarray) -> None:
    """Write displayed rows of pixels, (height, width) or (height, width, 3) uint8, as PNG."""
    Image.fromarray(pixels).save(path, format="PNG", compress_level=1)


def _opened(path: Path) -> Image.Image:
    nifti.check_readable(path)
    problem = f"{path}: not a readable PNG, JPEG, TIFF or GIF file"
    with explained(problem, *_DAMAGED), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(path, formats=("PNG", "JPEG", "TIFF", "GIF"))


def _upright(path: Path) -> Image.Image:
    problem = f"{path}: damaged or truncated, its pixels cannot be read"
    with _opened(path) as image, explained(problem, *_DAMAGED):
        pages = getattr(image, "n_frames", 1)
        if pages == 1:
            halved = _halved(image)
            image.load()
            upright, changed = ImageOps.exif_transpose(image), halved or _changed(image)
            if image.mode.startswith("I;16") and getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0:
                # as Pillow itself does with 8 bits
                upright = Image.fromarray(65535 - np.asarray(upright).astype(np.uint16))
    if pages != 1:
        raise ValueError(f"{path}: {pages} pages, expected one picture; save each page, or a volume as NIfTI")
    if changed:
        allowed = "8 or 16 bits without a sign, 32 bits with one, or floating-point; in colour 8 bits"
        raise ValueError(f"{path}: values of {changed}, which cannot be read; expected {allowed}")
    return upright


def _halved(image: Image.Image) -> str | None:
    """Values of which Pillow reads the upper 8 bits alone; None: none. Known before it loads them alone."""
    of_16_bits = any(";16" in str(tile[3]) for tile in getattr(image, "tile", []))
    return "16 bits in colour or with alpha" if of_16_bits and image.mode not in _GREY else None


def _changed(image: Image.Image) -> str | None:
    """What a TIFF holds that Pillow, whose modes lack it, reads as other values; None: nothing."""
    signed = getattr(image, "tag_v2", {}).get(_SAMPLE_FORMAT, (1,))[0] == 2
    if image.format != "TIFF" or image.mode not in ("L", "I"):
        return None
    low, high = image.getextrema()
    if image.mode == "L":
        return "8 bits below 0" if signed and high > 127 else None  # type: ignore[operator]
    return "32 bits of 2^31 or more" if not signed and low < 0 else None  # type: ignore[operator]


def _pixels(path: Path, image: Image.Image) -> np.ndarray:
    """(height, width) or (height, width, 3)."""
    if image.mode in _GREY:
        return np.asarray(image).astype(_GREY[image.mode])
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        image = image.convert("LA" if image.mode in ("LA", "La") else "RGBA")
        pixels = np.asarray(image)
        if pixels[..., -1].min() < 255:
            raise ValueError(f"{path}: partly transparent, expected opaque pixels; save it without alpha")
        return pixels[..., 0] if image.mode == "LA" else pixels[..., :3]
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _is_grey_gif(path: Path, image: Image.Image) -> bool:
    """GIF has no grey mode: a palette of greys alone, in any order, holds values."""
    colours = np.reshape(image.getpalette("RGB") or [], (-1, 3))[: np.asarray(image).max() + 1]
    return path.suffix.lower() == ".gif" and bool((colours == colours[:, :1]).all())


def _turned(pixels: np.ndarray) -> np.ndarray:
    """(height, width, ...) from the top to (X, Y, ...) from the bottom."""
    return np.swapaxes(pixels[::-1], 0, 1)


def _colours(pixels: np.ndarray) -> str:
    count = len(np.unique(pixels.reshape(-1, 3), axis=0))
    return f"a photograph of {count} colours" if count > _MAX_CLASSES else f"{count} colours"
