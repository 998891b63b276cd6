"""Reading of images in any format: NIfTI, MGH and pictures here, others by the door `IMAGE_FORMATS`."""

import os
import unicodedata
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path
from types import ModuleType

import numpy as np
from nibabel.nifti1 import Nifti1Pair

from medconv import doors
from medconv.data.case import Grid, Relabel
from medconv.data.io import class_masks, nifti, raster
from medconv.data.io.formats import Contours, ImageFormat, choice_of, structures_of
from medconv.data.io.grids import check_same_grid, fill, in_c_order, on_grid, rounding_doubts
from medconv.data.io.nifti import read_header
from medconv.utils.errors import ArgumentError
from medconv.utils.logging import some

UNORIENTED = (
    "NIfTI files that do not say where left and right are (qform_code = sform_code = 0); read as if the axes "
    "pointed left, anterior and superior, which may be mirrored"
)
DICOM_IS_MISSING = "DICOM needs the feature medconv/features/dicom, which is not there"
# Largest distance of a label value from a whole number; scaled integers read as 0.99999997
_ROUNDING_TOLERANCE = 1e-3
_MIN_VOLUME_SHARE = 1e-6  # of a voxel, relative to a cuboid of its spacing; below it, the affine is singular


def formats() -> tuple[ImageFormat, ...]:
    """All formats: volumes first, pictures last."""
    return _with_those_of(doors.features())


@cache
def _with_those_of(features: tuple[ModuleType, ...]) -> tuple[ImageFormat, ...]:
    """Args: features: that may bring formats; if one more enters, its formats do, too."""
    found = (nifti.NIFTI, *doors.objects(doors.IMAGE_FORMATS), raster.PICTURE)
    counts = Counter(suffix for image_format in found for suffix in image_format.suffixes)
    wrong = [suffix for suffix, count in counts.items() if count > 1 or not suffix.startswith(".")]
    if wrong:
        raise ValueError(f"suffixes of image formats: expected a dot and one format of each, got {wrong}")
    return found


def volume_suffixes() -> tuple[str, ...]:
    """Suffixes of all formats of volumes; DICOM has none."""
    return tuple(suffix for each in formats() if each is not raster.PICTURE for suffix in each.suffixes)


def suffixes() -> tuple[str, ...]:
    """Suffixes of volumes and pictures."""
    return tuple(suffix for each in formats() for suffix in each.suffixes)


def suffix_list() -> str:
    """`suffixes` in small letters, for messages."""
    return ", ".join(suffix for suffix in suffixes() if suffix.islower())


def stem(path: Path) -> str:
    """The file name without the suffix of its format; folder names and UIDs stay unchanged."""
    path, _ = choice_of(path)
    # In one Unicode form: a Mac may write an accent as a letter of its own, which looks the same
    name = unicodedata.normalize("NFC", path.name)
    suffix = _suffix(path)
    if suffix:
        return name[: -len(suffix)]
    is_uid = path.suffix[1:].isdecimal()  # the last number of a UID is not a suffix
    is_folder = os.path.isdir(path)  # noqa: PTH112 without an error for a name that is too long
    return name if is_folder or is_uid else Path(name).stem


def stamp(path: Path) -> list[int]:
    """Total bytes and modification time in ns of an image, which show that it was replaced.

    For several files a checksum of names and times takes the place of the time.

    Raises:
        OSError: absent.
        ValueError: a DICOM file whose series cannot be determined, a header without its voxels, or as
            `class_masks.files`.
    """
    if class_masks.is_of_masks(path):
        return _stamp_of([file for _, file in class_masks.files(path)])
    image_format = format_of(path)
    if image_format.stamp is not None:
        return image_format.stamp(path)
    # The other file of an image of two files, a header and its voxels; the same path of other images
    partner = path if image_format.voxel_file is None else image_format.voxel_file(path)
    if partner == path or not partner.exists():
        status = path.stat()
        return [status.st_size, status.st_mtime_ns]
    return _stamp_of([path, partner])


def _stamp_of(files: Sequence[Path]) -> list[int]:
    statuses = [(file.name, file.stat()) for file in files]
    times = sorted((name, status.st_mtime_ns) for name, status in statuses)
    return [sum(status.st_size for _, status in statuses), zlib.crc32(repr(times).encode())]


def in_folder(folder: Path, argument: str) -> dict[str, Path]:
    """The image files of a folder by stem, sorted.

    DICOM, hidden files, and pictures beside volumes are left out.

    Args:
        folder: subfolders are not searched.
        argument: name of the argument that gives the folder, for messages.

    Raises:
        ValueError: no such folder, no image in it, an ending in capitals, or two files with one stem.
    """
    if not folder.is_dir():
        problem = "is a file, expected a folder" if folder.is_file() else "no such folder"
        raise ArgumentError(argument, f" {folder}: {problem}")
    visible = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    images = [path for path in visible if path.name.endswith(suffixes())]
    volumes = [path for path in images if not raster.is_picture(path)]
    check_endings(visible, volume_suffixes() if volumes else suffixes(), argument)
    if not images:
        content = _count_suffixes(folder)
        raise ArgumentError(
            argument, f" {folder}: no image there ({suffix_list()}); the folder holds {content}"
        )
    files = volumes or images
    counts = Counter(stem(path) for path in files)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise ArgumentError(argument, f" {folder}: more than one file for {some(repeated, 20)}")
    return {stem(path): path for path in files}


def _count_suffixes(folder: Path) -> str:
    """The most frequent suffixes of a folder, such as `3 of .txt, 1 of LICENSE`."""
    files = [path for path in folder.iterdir() if path.is_file()]
    counts = Counter("".join(path.suffixes[-2:]) or path.name for path in files)
    return ", ".join(f"{count} of {suffix}" for suffix, count in counts.most_common(5)) or "no file"


def check_endings(paths: Sequence[Path], endings: tuple[str, ...], argument: str) -> None:
    """Check that no image is overlooked because its ending is in capitals.

    Args:
        endings: in small letters, of images.
        argument: name of the argument that gives the folder, for messages.

    Raises:
        ValueError: some of these files would be images if their endings were in small letters.
    """
    not_images = [path for path in paths if not path.name.endswith(suffixes())]
    in_capitals = [path for path in not_images if path.name.lower().endswith(endings)]
    if in_capitals:
        names = some([path.name for path in in_capitals], 20)
        raise ArgumentError(
            argument, f" {in_capitals[0].parent}: endings must be in small letters, rename {names}"
        )


def nifti_image(path: Path) -> Nifti1Pair | None:
    """A NIfTI file or pair without its voxels; None for other formats.

    Raises:
        ValueError: as `read_header`.
    """
    if structures_of(path) or format_of(path) is not nifti.NIFTI:
        return None
    image = read_header(path)
    return image if isinstance(image, Nifti1Pair) else None


def lacks_orientation(path: Path) -> bool:
    """Whether an image is NIfTI with neither sform nor qform.

    Raises:
        ValueError: as `read_header`.
    """
    image = nifti_image(path)
    return image is not None and not (image.header["sform_code"] or image.header["qform_code"])


def read_array(path: Path) -> tuple[np.ndarray, Grid]:
    """Voxels as stored (scaled if the header says so) and their grid.

    Args:
        path: a file; for DICOM a folder or a file.

    Raises:
        ValueError: missing, truncated, of an unknown format, not real numbers, or with a singular affine.
    """
    image_format = format_of(path)
    is_of_feature = image_format not in (nifti.NIFTI, raster.PICTURE) and image_format.suffixes
    if is_of_feature:
        nifti.check_readable(path)
    array, affine = image_format.read(path)
    if is_of_feature:
        nifti.check_shape(path, array.shape)
    if array.dtype.kind not in "iufb":
        raise ValueError(f"{path}: expected voxels that are real numbers, got {array.dtype}")
    grid = Grid.of(array.shape, affine)
    is_finite = np.isfinite(grid.matrix).all()
    if not (is_finite and grid.voxel_mm3 > _MIN_VOLUME_SHARE * np.prod(grid.spacing_mm)):
        raise ValueError(f"{path}: its affine is singular, so it has no spacing: {grid.affine}")
    return array, grid


def read_image(paths: Sequence[Path]) -> tuple[np.ndarray, Grid]:
    """All channels of a case and their grid.

    Shape: (channels, X, Y, Z) float32; one file may hold several channels along its fourth axis.

    Args:
        paths: one per channel, or one with all channels.

    Raises:
        ValueError: as `read_array`, or channels on different grids.
    """
    channels: list[np.ndarray] = []
    grids: list[Grid] = []
    for path in paths:
        array, grid = read_array(path)
        if grids:
            check_same_grid(paths[0], grids[0], path, grid)
        grids.append(grid)
        channels += list(np.moveaxis(array.reshape(*grid.shape, -1), -1, 0))
    # Converted and put in order at once: a whole-body CT is 700 MB.
    image = np.empty((len(channels), *grids[0].shape), np.float32)
    for index, channel in enumerate(channels):
        fill(image[index], channel)
    return image, grids[0]


def channel_doubts(paths: Sequence[Path]) -> list[str]:
    """Warnings about channels whose grids differ, though not by so much that `read_image` refuses them."""
    grids = [Grid.of(*shape_and_affine(path)) for path in paths]
    return [
        doubt
        for path, grid in zip(paths, grids, strict=True)
        for doubt in rounding_doubts(paths[0], grids[0], path, grid)
    ]


def read_label(
    path: Path, like: Path | None = None, relabel: Relabel | None = None
) -> tuple[np.ndarray, Grid]:
    """A label map and its grid; values within 0.001 of whole numbers are rounded.

    Shape: (X, Y, Z) int16.

    Args:
        path: the label map, a mask for each class, or contours (RTSTRUCT).
        like: an image or label map of the case, on whose grid contours are filled and masks put together; a
            picture, which has no position in the patient, takes its grid.
        relabel: see `Case.relabel`.

    Raises:
        ValueError: as `read_array`, contours that cannot be filled, a picture of an image whose axes are not
            those of a picture, a value that is not a whole number, of which it names the worst and its voxel,
            or one that is not among those to relabel.
    """
    if structures_of(path):
        is_of_masks = class_masks.is_of_masks(path)
        label, grid = _of_masks(path, like) if is_of_masks else _of_contours(path, like or path)
        return label if relabel is None else relabelled(label, relabel, path), grid
    if raster.is_picture(path):
        array = raster.read_mask(path)
        grid = _grid_of_mask(path, like or path)
    else:
        array, grid = _read_no_image(path, like) or read_array(path)
    if [n for n in array.shape if n != 1] != [n for n in grid.shape if n != 1]:
        raise ValueError(f"{path}: a label map has one value per voxel, got shape {array.shape}")
    if array.dtype.kind == "f":
        array = _whole_numbers(path, array)
    lowest = array.min()
    highest = max([np.iinfo(np.int16).max, *dict(relabel or ())])
    if relabel is not None and lowest >= 0 and array.max() <= highest:  # else a table of any size
        array = relabelled(array.astype(np.int64, copy=False), relabel, path)
    if lowest < 0 or array.max() > np.iinfo(np.int16).max:
        raise ValueError(f"{path}: label values must lie in 0..32767, found {lowest} to {array.max()}")
    return in_c_order(array.reshape(grid.shape), np.int16), grid


def _of_contours(path: Path, image: Path) -> tuple[np.ndarray, Grid]:
    grid = Grid.of(*shape_and_affine(image))
    return _contours(path).read(path, image, grid), grid


def _of_masks(path: Path, like: Path | None) -> tuple[np.ndarray, Grid]:
    """Masks put together on the grid of an image; None: of the first one."""
    if like is None:
        (_, like), *_ = class_masks.files(path)
    image = like
    grid = Grid.of(*shape_and_affine(image))

    def read(file: Path) -> np.ndarray:
        mask, mask_grid = read_label(file, image)
        return on_grid(mask, image, grid, file, mask_grid)

    return class_masks.combined(path, grid.shape, read), grid


def relabelled(label: np.ndarray, relabel: Relabel, path: Path) -> np.ndarray:
    """A label map with the values of the dataset in place of those of its file.

    Args:
        label: not below 0.

    Raises:
        ValueError: a value that is not among those to relabel.
    """
    new_values = dict(relabel)
    # Indexed by the value in the file; -1 marks values that are not declared
    table = np.full(1 + max(*new_values, int(label.max())), -1, np.int16)
    table[list(new_values)] = list(new_values.values())
    new_label: np.ndarray = table[label]
    undeclared = np.unique(label[new_label < 0]).tolist()
    if undeclared:
        expected = ", ".join(str(value) for value in sorted(new_values))
        raise ValueError(f"{path}: label values {undeclared} are not declared, expected {expected}")
    return new_label


def _read_no_image(path: Path, like: Path | None) -> tuple[np.ndarray, Grid] | None:
    """A label map that is no image, on the grid of the image `like`; None: it is one."""
    read = format_of(path).label
    if read is None or like is None or like == path:
        return None
    grid = Grid.of(*shape_and_affine(like))
    label = read(path, like, grid)
    return None if label is None else (label, grid)


def label_names(path: Path) -> dict[int, str] | None:
    """The names that a label file states of its values; empty: none; None: it cannot be read.

    An error of the file is reported where its voxels are read.
    """
    if class_masks.is_of_masks(path):
        return class_masks.names(path)
    if structures_of(path):
        return {}
    try:
        names = format_of(path).names
        return {value: name for value, name in (names(path) if names else {}).items() if value > 0 and name}
    except (ValueError, OSError):
        return None


def _grid_of_mask(path: Path, like: Path) -> Grid:
    """The grid of a mask that is a picture: that of the slice `like`, if both have the same pixels.

    Raises: ValueError: the axes of that slice are not those of a picture, which does not say what it shows.
    """
    grid = Grid.of(*shape_and_affine(path))
    if raster.is_picture(like):
        return grid
    like_grid = Grid.of(*shape_and_affine(like))
    if like_grid.shape != grid.shape:  # an error of the caller, who knows both
        return grid
    is_picture_order = np.array_equal(like_grid.canonical_axes[:2], grid.canonical_axes[:2])
    if not (is_picture_order or format_of(like).as_displayed):
        raise ValueError(
            f"{path}: a picture has rows from the top, the axes of {like} are {like_grid.orientation}, so "
            "which pixel belongs to which voxel is not known; expected a label map with axes, such as NIfTI"
        )
    return like_grid


def _whole_numbers(path: Path, array: np.ndarray) -> np.ndarray:
    """Rounded label values.

    Raises: ValueError: a value that is not finite, or not close to a whole number.
    """
    is_finite = np.isfinite(array)
    if not is_finite.all():
        raise ValueError(f"{path}: {(~is_finite).sum()} label values are not finite")
    rounded: np.ndarray = np.rint(array)
    distance = np.abs(array - rounded)
    if distance.max() > _ROUNDING_TOLERANCE:
        voxel = tuple(int(index) for index in np.unravel_index(distance.argmax(), distance.shape))
        raise ValueError(
            f"{path}: label values must be whole numbers, "
            f"found {float(array[voxel]):.9g} at voxel {voxel}; "
            f"within {_ROUNDING_TOLERANCE} of one they are rounded"
        )
    return rounded


def missing_slices(path: Path, image: Path, grid: Grid) -> list[str]:
    """Warnings about contours that leave out slices.

    Raises:
        ValueError: as `read_label`.
    """
    if class_masks.is_of_masks(path):
        return []
    return _contours(path).missing_slices(path, image, grid)


def _contours(path: Path) -> Contours:
    """Those of the format that reads contours. Raises: ValueError: none does."""
    for image_format in formats():
        if image_format.contours is not None:
            return image_format.contours
    raise ValueError(f"{path}: {DICOM_IS_MISSING}")


def shape_and_affine(path: Path) -> tuple[tuple[int, ...], np.ndarray]:
    """Axes and affine of an image of any format, without its voxels.

    Raises:
        ValueError: as `read_array`.
    """
    return format_of(path).grid(path)


def num_channels(path: Path) -> int:
    """Channels of an image file; from its header, where that says it.

    Raises:
        ValueError: as `read_array`.
    """
    if raster.is_picture(path):
        return raster.channels(path)
    if not format_of(path).suffixes:  # DICOM, whose header is that of one slice
        image, _ = read_image([path])
        return len(image)
    shape, _ = shape_and_affine(path)
    nifti.check_shape(path, shape)
    return prod(shape[3:])  # volumes have the channels last


def format_of(path: Path) -> ImageFormat:
    """The format of an image: by the file name, else by its content; NIfTI if none knows it.

    Raises:
        ValueError: a folder, or a file without a suffix of any format, and no format knows such.
    """
    suffix = _suffix(path)
    if not suffix:
        return known_by_content(path) or nifti.NIFTI
    return next((each for each in formats() if suffix in each.suffixes), nifti.NIFTI)  # .img is of NIfTI


def known_by_content(path: Path) -> ImageFormat | None:
    """The format without suffixes, such as DICOM, that a file or a folder has; None: it has none.

    Raises:
        ValueError: there is something, and no such format.
    """
    by_content = [image_format for image_format in formats() if image_format.is_mine is not None]
    if not by_content and path.exists():
        raise ValueError(f"{path}: not one of {suffix_list()}; {DICOM_IS_MISSING}")
    return next((each for each in by_content if each.is_mine is not None and each.is_mine(path)), None)


def label_suffix(images: Sequence[Path]) -> str:
    """The suffix of the files in which label maps of these images are written.

    `.png` if all are pictures, that of a format which all have if it can be written, else `.nii.gz`.
    """
    if all(map(raster.is_picture, images)):
        return ".png"
    found = {_suffix(path) for path in images}
    if len(found) == 1 and "" not in found and format_of(images[0]).write is not None:
        return found.pop()
    return ".nii.gz"


def _suffix(path: Path) -> str:
    """The suffix of a format; empty if the file name has none."""
    matches = [suffix for suffix in (*suffixes(), ".img") if path.name.endswith(suffix)]
    return max(matches, key=len, default="")  # the suffix of a feature may end in another
