"""PNG, JPEG, TIFF and GIF, by Pillow: pictures, masks and clear errors.

A picture is an image of one slice with 1 mm pixels; its position is unknown. The first axis goes along a row,
the second down, and it shows a patient as viewers of DICOM do: rows go to the left, columns to posterior.
"""

import math
import re
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageColor, ImageOps

from medconv.data.io import nifti
from medconv.data.io.formats import ImageFormat
from medconv.utils.errors import explained

_ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".gif")
SUFFIXES = (*_ENDINGS, *(ending.upper() for ending in _ENDINGS))
# Okabe & Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
PIXEL_MM = (1.0, 1.0)  # a picture's, for want of another
CHANNELS = {1: ("grey",), 3: ("red", "green", "blue")}
# What Pillow raises for damaged files
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, LookupError, MemoryError, struct.error, zlib.error)
_TRANSPARENT = "partly transparent, expected opaque pixels; save it without alpha"
# Types of grey values by Pillow's mode
_GREY = {
    "1": np.uint8,
    "L": np.uint8,
    "I": np.int32,
    "F": np.float32,
    "I;16": np.uint16,
    "I;16L": np.uint16,
    "I;16B": np.uint16,
}
_EXIF_ORIENTATION = 0x0112
_SWAPS_SIDES = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_PILLOWS_LIMIT = threading.Lock()  # of the program's threads, some read pictures
_IMAGE_WIDTH = 256  # TIFF tag
_SAMPLE_FORMAT = 339  # TIFF tag: 1 unsigned, 2 signed
_SIGNED = 2
_SAMPLES_PER_PIXEL = 277  # TIFF tag
_IMAGE_DEPTH = 32997  # TIFF tag: slices of a volume
_DESCRIPTION = 270  # TIFF tag
_SPREAD = {"L;2": 85, "L;4": 17}  # by Pillow: values of 2 and 4 bits, over 0 to 255
_TIFF_BEGINS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_ALLOWED = "8 or 16 bits without a sign, 32 bits with one, or float32; in colour 8 bits"
_PHOTOMETRIC = 262  # TIFF tag: 0 where the lowest value is white
_WHITE_IS_ZERO = 0
# Masks that all hold 0 and the same value from here on, for example 255, have one class
MIN_SINGLE_VALUE = 100
MAX_CLASSES = 64  # a mask with more values is a photograph, or has one for each object
# Pixels that equal two of their four neighbours, without those of the most frequent value: in maps of nuclei,
# of vessels cut to pieces and of packed squares at least 0.90, in pictures of six data sets at most 0.73
_OBJECT_SHARE = 0.8
_AFFINE = np.diag([-1.0, -1.0, 1.0, 1.0])  # as of a DICOM slice without a position in the patient


def colour(value: int) -> str:
    """The colour of a label value in HTML notation; seven colours repeat, and the background is black."""
    return COLOURS[(value - 1) % len(COLOURS)] if value else "#000000"


def is_picture(path: Path) -> bool:
    """Whether a file name has the suffix of a picture."""
    return path.name.endswith(SUFFIXES)


def are_picture_channels(modalities: Sequence[str]) -> bool:
    """Whether these modalities are the channels of pictures: grey, or red, green, blue."""
    return tuple(modalities) in CHANNELS.values()


def channels(path: Path) -> int:
    """Number of channels, 1 or 3, from the header.

    Raises:
        ValueError: as `read`.
    """
    with _opened(path) as image:
        is_grey = image.mode in (*_GREY, "LA", "La")
        return 1 if is_grey else 3


def size(path: Path) -> tuple[int, int]:
    """(X, Y) after EXIF rotation, from the header.

    Raises:
        ValueError: as `read`.
    """
    with _opened(path) as image:
        is_turned = image.getexif().get(_EXIF_ORIENTATION, 1) in _SWAPS_SIDES
        # Pillow says the size of a TIFF as it is after the turn
        stored_width = getattr(image, "tag_v2", {}).get(_IMAGE_WIDTH, image.width)
        if is_turned and stored_width == image.width:
            return image.height, image.width
        return image.width, image.height


def turn_doubts(path: Path, mask: Path) -> list[str]:
    """A warning if EXIF data turn one of a picture and its mask, and their sizes do not tell whether that is
    right: whoever drew the mask may have seen the picture before or after.

    Raises:
        ValueError: as `read`.
    """
    with _opened(path) as image, _opened(mask) as label:
        turn = image.getexif().get(_EXIF_ORIENTATION, 1)
        turn_of_mask = label.getexif().get(_EXIF_ORIENTATION, 1)
        is_other_size = (turn in _SWAPS_SIDES) != (
            turn_of_mask in _SWAPS_SIDES
        ) and image.width != image.height
    if turn == turn_of_mask or is_other_size:
        return []
    return [
        f"{mask}: has EXIF orientation {turn_of_mask}, {path} has {turn} (1: not turned); the mask must fit "
        "the picture as it is displayed, else remove the orientation of both"
    ]


def read(path: Path) -> np.ndarray:
    """Pixels as displayed: EXIF rotation and palette applied, no alpha.

    Shape: (X, Y, 1) for grey, (X, Y, 1, 3) for colours.

    Raises:
        ValueError: not PNG, JPEG, TIFF or GIF, damaged, several pages, or partly transparent.
    """
    pixels = _pixels(path, _upright(path))
    return np.swapaxes(pixels, 0, 1)[:, :, None]


def read_mask(path: Path) -> np.ndarray:
    """Label values: grey values or palette indices.

    Shape: (X, Y, 1) integers.

    Raises:
        ValueError: as `read`; colours, or a photograph.
    """
    image = _upright(path)
    if image.mode == "P" and not _is_grey_gif(path, image):
        pixels = np.asarray(image)  # palette indices
    else:
        pixels = _grey_values(path, _pixels(path, image))
        if image.mode == "L":
            pixels = pixels // _spread(path)
    _check_mask_values(path, pixels)
    return pixels.T[:, :, None]


def _spread(path: Path) -> int:
    """By how much Pillow multiplies grey values that have fewer bits than it has."""
    with _opened(path) as image:
        raw_modes = [
            str(tile[3] if isinstance(tile[3], str) else tile[3][0]) for tile in getattr(image, "tile", [])
        ]
    return _SPREAD.get(raw_modes[0].removesuffix("I"), 1) if raw_modes else 1


def _grey_values(path: Path, pixels: np.ndarray) -> np.ndarray:
    """Pixels of one channel: (height, width) or (height, width, 3) -> (height, width).

    Raises: ValueError: the channels differ.
    """
    if pixels.ndim == 2:
        return pixels
    if (pixels != pixels[..., :1]).any():
        count = len(np.unique(pixels.reshape(-1, 3), axis=0))
        colours = f"a photograph of {count} colours" if count > MAX_CLASSES else f"{count} colours"
        raise ValueError(
            f"{path}: {colours}, expected a mask of label values: grey 0, 1, 2, ..., 0 and 255, or a palette"
        )
    return pixels[..., 0]


def _check_mask_values(path: Path, pixels: np.ndarray) -> None:
    """Raises: ValueError: more different values than a mask has, unless they are those of objects."""
    is_jpeg = path.suffix.lower() in (".jpg", ".jpeg")
    values, counts = np.unique(pixels, return_counts=True)
    num_values = len(values)
    # JPEG keeps the values of a mask only if there are one or two
    if num_values > (2 if is_jpeg else MAX_CLASSES):
        if not is_jpeg and _flat_share(pixels, values[counts.argmax()]) > _OBJECT_SHARE:
            return
        hint = "; JPEG blurs the values of a mask, PNG keeps them" if is_jpeg else ""
        raise ValueError(
            f"{path}: {num_values} different values, expected a mask of label values, not a photograph{hint}"
        )


def _flat_share(pixels: np.ndarray, background: int) -> float:
    """The share of pixels, without the background, that equal two of their four neighbours."""
    equal = np.zeros(pixels.shape, np.uint8)
    down = pixels[1:] == pixels[:-1]
    right = pixels[:, 1:] == pixels[:, :-1]
    equal[1:] += down
    equal[:-1] += down
    equal[:, 1:] += right
    equal[:, :-1] += right
    return float((equal[pixels != background] >= 2).mean())


def check_ignored(values: Iterable[int | None], masks: Iterable[Path | None], num_classes: int) -> None:
    """Check that pictures can hold the values to ignore.

    Args:
        values: label values; None: no value is ignored.
        masks: label maps of any format; None where a case has none.
        num_classes: with the background; of several besides it, masks are read as they are.

    Raises:
        ValueError: a picture, in which the value to ignore may stand for the only class.
    """
    unclear = [value for value in values if value is not None and value >= MIN_SINGLE_VALUE]
    if num_classes > 2 or not unclear:
        return
    for path in masks:
        if path is not None and is_picture(path):
            raise ValueError(
                f"{path}: the value to ignore must be below {MIN_SINGLE_VALUE}, "
                f"as a mask of 0 and {unclear[0]} is read as 0 and 1"
            )


def write_mask(path: Path, label: np.ndarray) -> None:
    """Write label values as PNG: with 8 bits as indices of a palette, if they fit, so that viewers show them.

    Shape: label (X, Y, 1).
    """
    dtype = np.uint8 if label.max(initial=0) < 256 else np.uint16
    pixels = np.ascontiguousarray(label.reshape(label.shape[:2]).T).astype(dtype)
    image = Image.fromarray(pixels)
    if dtype == np.uint8:
        image.putpalette([part for value in range(256) for part in ImageColor.getrgb(colour(value))])
    image.save(path, format="PNG")


def write_picture(path: Path, pixels: np.ndarray) -> None:
    """Write displayed rows of pixels, (height, width) or (height, width, 3) uint8, as PNG."""
    Image.fromarray(pixels).save(path, format="PNG", compress_level=1)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    nifti.check_readable(path)
    # Not by its name, by which Pillow maps uncompressed pixels, in the wrong order if a TIFF is turned
    with path.open("rb") as file:
        problem = f"{path}: not a readable PNG, JPEG, TIFF or GIF file"
        if file.read(4) in _TIFF_BEGINS:
            problem += f", or a TIFF of other values than {_ALLOWED}"
        file.seek(0)
        with explained(problem, *_DAMAGED), _of_any_size():
            image = Image.open(file, formats=("PNG", "JPEG", "TIFF", "GIF"))
        nifti.check_memory(path, image.size)
        with image:
            yield image


@contextmanager
def _of_any_size() -> Iterator[None]:
    """Inside, Pillow takes no large picture, such as a slide of pathology, for an attack."""
    with _PILLOWS_LIMIT:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _upright(path: Path) -> Image.Image:
    """The picture after EXIF rotation, its pixels loaded.

    Raises: ValueError: damaged, several pages, or values that Pillow would change.
    """
    problem = f"{path}: damaged or truncated, its pixels cannot be read"
    with _opened(path) as image, explained(problem, *_DAMAGED):
        # A phone's JPEG may hold previews and brightness maps of its picture, which comes first
        num_frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
        num_pages = max(num_frames, _pages_in_one(image))
        tags = getattr(image, "tag_v2", {})  # of a TIFF
        num_samples = tags.get(_SAMPLES_PER_PIXEL, 0)
        lacks_samples = num_samples > len(image.getbands())
        if num_pages == 1 and not lacks_samples:
            has_lost_bits = _loses_bits(image)  # before loading: Pillow then forgets the tiles
            image.load()
            upright = ImageOps.exif_transpose(image)
            changed = "16 bits in colour or with alpha" if has_lost_bits else _changed_values(image)
            if image.mode.startswith("I;16") and tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
                # As Pillow itself does with 8 bits
                upright = Image.fromarray(65535 - np.asarray(upright).astype(np.uint16))
    if num_pages != 1:
        raise ValueError(
            f"{path}: {num_pages} pages, expected one picture; save each page, or a volume as NIfTI"
        )
    if lacks_samples:
        raise ValueError(
            f"{path}: {num_samples} values for each pixel, expected grey, red-green-blue, or these with alpha"
        )
    if changed:
        raise ValueError(f"{path}: values of {changed}, which cannot be read; expected {_ALLOWED}")
    return upright


def _pages_in_one(image: Image.Image) -> int:
    """How many pages a TIFF says to have whose programs write them one after another into the first one."""
    tags = getattr(image, "tag_v2", {})
    pages = [int(tags.get(_IMAGE_DEPTH, 1))]
    description = str(tags.get(_DESCRIPTION, ""))
    if description.startswith("ImageJ="):
        pages += map(int, re.findall(r"^images=(\d+)\s*$", description, re.MULTILINE))
    elif described := re.match(r'\{"shape": \[([\d, ]+)\]', description):  # by tifffile
        values = math.prod(int(size) for size in described[1].split(","))
        samples = int(tags.get(_SAMPLES_PER_PIXEL, 1))
        pages.append(values // (image.width * image.height * samples))
    return max(pages)


def _loses_bits(image: Image.Image) -> bool:
    """Whether Pillow will read only the upper 8 of 16 bits."""
    tiles = getattr(image, "tile", [])
    has_16_bits = any(";16" in str(tile[3]) for tile in tiles)
    return has_16_bits and image.mode not in _GREY


def _changed_values(image: Image.Image) -> str | None:
    """Values of a TIFF that Pillow has no mode for and reads as other values; None: there are none."""
    if image.format != "TIFF" or image.mode not in ("L", "I"):
        return None
    sample_formats = getattr(image, "tag_v2", {}).get(_SAMPLE_FORMAT, (1,))  # one per channel
    is_signed = sample_formats[0] == _SIGNED
    lowest, highest = image.getextrema()
    if image.mode == "L":  # 8 bits without a sign
        return "8 bits below 0" if is_signed and highest > 127 else None  # type: ignore[operator]
    # 32 bits with a sign
    return "32 bits of 2^31 or more" if not is_signed and lowest < 0 else None  # type: ignore[operator]


def _pixels(path: Path, image: Image.Image) -> np.ndarray:
    """Pixels without alpha. Shape: (height, width) or (height, width, 3)."""
    if image.mode in _GREY:
        grey = np.asarray(image).astype(_GREY[image.mode])
        transparent = image.info.get("transparency")  # the grey value that is so
        if isinstance(transparent, int) and (grey == transparent).any():
            raise ValueError(f"{path}: {_TRANSPARENT}")
        return grey
    bands = image.getbands()
    if "A" in bands or "a" in bands or "transparency" in image.info:
        return _opaque_pixels(path, image)
    if image.mode != "RGB":
        image = image.convert("RGB")
    return np.asarray(image)


def _opaque_pixels(path: Path, image: Image.Image) -> np.ndarray:
    """Raises: ValueError: some pixel is transparent."""
    is_grey = image.mode in ("LA", "La")
    pixels = np.asarray(image.convert("LA" if is_grey else "RGBA"))
    alpha = pixels[..., -1]
    if alpha.min() < 255:
        raise ValueError(f"{path}: {_TRANSPARENT}")
    return pixels[..., 0] if is_grey else pixels[..., :3]


def _is_grey_gif(path: Path, image: Image.Image) -> bool:
    """Whether a GIF's palette has only greys: GIF has no grey mode, so its colours are the values."""
    if path.suffix.lower() != ".gif":
        return False
    palette = np.reshape(image.getpalette("RGB") or [], (-1, 3))
    colours = palette[: np.asarray(image).max() + 1]
    return bool((colours == colours[:, :1]).all())


PICTURE = ImageFormat(
    suffixes=SUFFIXES,
    read=lambda path: (read(path), _AFFINE),
    grid=lambda path: ((*size(path), 1), _AFFINE),
    as_displayed=True,
)
