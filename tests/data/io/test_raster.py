"""medconv/data/io/raster.py: PNG, JPEG, TIFF and GIF files as images, masks, cases and predictions."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.restoring import restore
from helpers.volumes import truncate
from PIL import Image, ImageColor

from medconv.data.case import Case
from medconv.data.case_files import label_of
from medconv.data.datasets.folder import folder
from medconv.data.io import raster
from medconv.data.io.grids import to_canonical
from medconv.data.io.images import in_folder, num_channels, read_image, read_label, stamp, stem
from medconv.data.io.writing import write_channels, write_label
from medconv.data.preprocessing.check import check
from medconv.data.preprocessing.dataset_cache import cached_fingerprint, fill_store
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.inference.inputs import find_cases
from medconv.inference.output import OutputDir

GREY = np.arange(6 * 4, dtype=np.uint8).reshape(4, 6) * 10  # four rows of six pixels, from the top
RGB = np.stack([GREY, GREY + 1, 255 - GREY], axis=-1)


def save(path, pixels, **settings):
    path.parent.mkdir(parents=True, exist_ok=True)
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(path, **settings)
    return path


def as_seen(volume):
    """(X, Y, 1) to rows from the top, without the function that is tested."""
    return np.array([[volume[x, y, 0] for x in range(volume.shape[0])] for y in range(volume.shape[1])])


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
@pytest.mark.parametrize("pixels", [GREY, GREY.astype(np.uint16) * 200])
def test_a_turned_tiff_is_read_upright(tmp_path, compression, pixels):
    """Pillow turns it itself, and maps uncompressed pixels in the wrong order where it is given a name."""
    path = save(tmp_path / "a.tif", pixels, compression=compression, tiffinfo={0x0112: 6})
    upright = np.rot90(pixels, -1)
    assert raster.size(path) == upright.T.shape == (4, 6)
    np.testing.assert_array_equal(as_seen(read_image([path])[0][0]), upright)
    mask = save(tmp_path / "m.tif", pixels // 200, compression=compression, tiffinfo={0x0112: 6})
    np.testing.assert_array_equal(as_seen(read_label(mask)[0]), upright // 200)


def test_a_picture_of_200_megapixels_is_no_attack(tmp_path):
    limit = Image.MAX_IMAGE_PIXELS
    path = save(tmp_path / "slide.png", Image.new("1", (20_000, 10_000)))
    assert raster.size(path) == (20_000, 10_000) and limit == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize(
    ("name", "pixels"),
    [
        ("a.png", GREY),
        ("a.tif", GREY),
        ("A.PNG", GREY.astype(np.uint16) * 200),
        ("a.tiff", GREY.astype(np.uint16) * 200),
        ("f.tif", GREY.astype(np.float32) / 7),
        ("bits.png", GREY > 100),
    ],
)
def test_grey_pixels_are_read_exactly(tmp_path, name, pixels):
    path = save(tmp_path / name, pixels)
    image, grid = read_image([path])
    np.testing.assert_array_equal(as_seen(image[0]), pixels.astype(np.float32))
    assert grid.shape == (6, 4, 1) and grid.spacing_mm == (1, 1, 1) and grid.orientation == "LPS"
    assert num_channels(path) == 1 and stem(path) == path.name.split(".")[0] and len(stamp(path)) == 2


def test_colours_are_three_channels_and_an_opaque_alpha_is_dropped(tmp_path):
    alpha = np.concatenate([RGB, np.full((4, 6, 1), 255, np.uint8)], axis=-1)
    palette = Image.fromarray(RGB).quantize(256)
    for path in (
        save(tmp_path / "a.png", RGB),
        save(tmp_path / "b.png", alpha),
        save(tmp_path / "c.tif", RGB),
    ):
        image, _ = read_image([path])
        assert num_channels(path) == 3
        for channel in range(3):
            np.testing.assert_array_equal(as_seen(image[channel]), RGB[..., channel])
    assert read_image([save(tmp_path / "p.png", palette)])[0].shape == (3, 6, 4, 1)
    jpeg, _ = read_image([save(tmp_path / "j.jpg", np.full((4, 6, 3), 77, np.uint8))])
    assert np.abs(jpeg - 77).max() <= 2


def test_the_picture_of_a_phone_may_have_previews(tmp_path):
    picture = Image.new("RGB", (9, 8), "red")
    picture.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[picture.resize((3, 2))])
    with Image.open(tmp_path / "a.jpg") as image:
        assert image.n_frames == 2
    assert read_image([tmp_path / "a.jpg"])[0].shape == (3, 9, 8, 1)


def test_a_rotated_photograph_is_read_upright(tmp_path):
    """Orientation 6: the stored rows are columns, from the right."""
    exif = Image.Exif()
    exif[0x0112] = 6
    path = save(tmp_path / "a.png", GREY, exif=exif)
    assert raster.size(path) == (4, 6)
    np.testing.assert_array_equal(as_seen(read_image([path])[0][0]), np.rot90(GREY, -1))
    np.testing.assert_array_equal(
        as_seen(read_label(save(tmp_path / "m.png", GREY // 10, exif=exif))[0]), np.rot90(GREY // 10, -1)
    )


@pytest.mark.parametrize(
    ("pixels", "expected"),
    [
        (GREY // 60, GREY // 60),
        (np.where(GREY > 100, 255, 0).astype(np.uint8), np.where(GREY > 100, 255, 0)),
        (np.where(GREY > 100, 32767, 0).astype(np.uint16), np.where(GREY > 100, 32767, 0)),
        (GREY > 100, GREY > 100),
        # the third class, not the second
        (np.where(GREY > 100, 2, 0).astype(np.uint8), np.where(GREY > 100, 2, 0)),
        (np.where(GREY > 100, 255, GREY // 100).astype(np.uint8), np.where(GREY > 100, 255, GREY // 100)),
        (np.stack([GREY // 60] * 3, axis=-1), GREY // 60),
        (np.zeros((4, 6), np.uint8), np.zeros((4, 6))),
    ],
    ids=["values", "0 and 255", "16 bits", "one bit", "0 and 2", "0 1 255", "grey as RGB", "empty"],
)
def test_masks_are_read_as_label_values(tmp_path, pixels, expected):
    label, grid = read_label(save(tmp_path / "m.png", pixels))
    np.testing.assert_array_equal(as_seen(label), expected)
    assert label.dtype == np.int16 and grid.shape == (6, 4, 1)


@pytest.mark.parametrize("bits", [2, 4])
def test_values_of_few_bits_are_no_other_labels(tmp_path, bits):
    """Pillow spreads them over 0 to 255."""
    values = GREY % 4
    fields = values.reshape(-1, 8 // bits) if bits == 4 else np.pad(values, ((0, 0), (0, 2))).reshape(-1, 4)
    shifts = np.arange(8 - bits, -1, -bits)
    rows = (fields << shifts).sum(1).astype(np.uint8).reshape(4, -1)
    header = struct.pack(">IIBBBBB", 6, 4, bits, 0, 0, 0, 0)
    path = png(tmp_path / "m.png", header, rows)
    np.testing.assert_array_equal(as_seen(read_label(path)[0]), values)


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [
        ((5, 4, 6), {"imagej": True, "truncate": True}, "a.tif: 5 pages, expected one picture"),
        ((5, 4, 6), {"truncate": True}, "a.tif: 5 pages, expected one picture"),
        ((5, 16, 16), {"volumetric": True, "tile": (1, 16, 16)}, "a.tif: 5 pages, expected one picture"),
        (
            (4, 6, 2),
            {"planarconfig": "contig", "photometric": "minisblack"},
            "a.tif: 2 values for each pixel",
        ),
        ((4, 6, 5), {"planarconfig": "contig", "photometric": "rgb"}, "a.tif: 5 values for each pixel"),
        ((4, 6), {"dtype": np.float16}, "or a TIFF of other values than 8 or 16 bits without a sign"),
    ],
)
def test_a_tiff_of_more_than_pillow_shows_is_refused(tmp_path, shape, settings, message):
    tifffile = pytest.importorskip("tifffile", reason="comes with scikit-image")
    values = np.arange(np.prod(shape)).reshape(shape).astype(settings.pop("dtype", np.uint8))
    tifffile.imwrite(tmp_path / "a.tif", values, **settings)
    with pytest.raises(ValueError, match=message):
        read_image([tmp_path / "a.tif"])


def test_a_palette_is_read_by_index(tmp_path):
    mask = Image.fromarray((GREY // 60).astype(np.uint8), mode="P")
    mask.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255])
    np.testing.assert_array_equal(as_seen(read_label(save(tmp_path / "m.png", mask))[0]), GREY // 60)


def text(path):
    path.write_text("not a picture at all")
    return path


def pages(path):
    page = Image.fromarray(GREY)
    return save(path, page, save_all=True, append_images=[page, page])


def unsigned(path):
    """Sample format 1 instead of 2, the tag in its place."""
    content, tags = path.read_bytes(), [struct.pack("<HHII", 339, 3, 1, value) for value in (2, 1)]
    assert content.count(tags[0]) == 1
    path.write_bytes(content.replace(*tags))
    return path


def deep_png(path, colour_type):
    """Of 16 bits, of which Pillow would read 8: RGB is colour type 2, grey with alpha 4."""
    channels = {2: 3, 4: 2}[colour_type]
    rows = np.full((4, 4 * channels), 300, ">u2")
    return png(path, struct.pack(">IIBBBBB", 4, 4, 16, colour_type, 0, 0, 0), rows)


def png(path, header, rows):
    chunks = {
        b"IHDR": header,
        b"IDAT": zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)),
        b"IEND": b"",
    }
    parts = (
        struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks.items()
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    return path


def tiff(path, pixels, photometric):
    """Uncompressed. Shape: (height, width) or (height, width, 3)."""
    content, bits = pixels.tobytes(), 8 * pixels.itemsize
    height, width, channels = (*pixels.shape, 1)[:3]
    entries = {256: width, 257: height, 258: 8 if channels > 1 else bits, 259: 1, 262: photometric}
    entries |= {273: 14, 277: channels, 278: height, 279: len(content)}
    tags = [
        struct.pack("<HHII", tag, 3, channels if tag == 258 else 1, value) for tag, value in entries.items()
    ]
    table = struct.pack("<H", len(tags)) + b"".join(tags) + bytes(4)
    start = struct.pack("<I", 14 + len(content)) + struct.pack("<HHH", bits, bits, bits)
    path.write_bytes(b"II*\0" + start + content + table)
    return path


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_tiff_whose_lowest_value_is_white_is_bright_there(tmp_path, dtype):
    largest, pixels = np.iinfo(dtype).max, GREY.astype(dtype)
    for photometric, expected in ((1, pixels), (0, largest - pixels)):
        seen = as_seen(read_image([tiff(tmp_path / "a.tif", pixels, photometric)])[0][0])
        np.testing.assert_array_equal(seen, expected)


READ, DEEP = (read_image, read_label), "values of 16 bits in colour or with alpha, which cannot be read"
NOISE = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
MASK = np.where(NOISE[..., 0] > 128, 255, 0).astype(np.uint8)


@pytest.mark.parametrize(
    ("read", "make", "message"),
    [
        (read_image, lambda p: text(p / "a.png"), "a.png: not a readable PNG, JPEG, TIFF or GIF file"),
        (
            read_image,
            lambda p: truncate(save(p / "a.png", NOISE)),
            "a.png: damaged or truncated, its pixels cannot be read",
        ),
        (
            read_image,
            lambda p: truncate(save(p / "a.jpg", NOISE)),
            "a.jpg: damaged or truncated, its pixels cannot be read",
        ),
        (read_image, lambda p: truncate(save(p / "a.tif", NOISE)), "a.tif: "),
        (
            read_image,
            lambda p: unsigned(save(p / "a.tif", np.full((4, 4), -2, np.int32))),
            "a.tif: values of 32 bits of 2^31 or more, which cannot be read; expected 8 or 16",
        ),
        (
            read_image,
            lambda p: save(p / "a.tif", GREY, tiffinfo={339: 2}),
            "a.tif: values of 8 bits below 0, which cannot be read",
        ),
        *((read, lambda p, c=c: deep_png(p / "a.png", c), f"a.png: {DEEP}") for read in READ for c in (2, 4)),
        (
            read_image,
            lambda p: tiff(p / "a.tif", np.dstack([GREY] * 3).astype(np.uint16), 2),
            f"a.tif: {DEEP}",
        ),
        (read_image, lambda p: pages(p / "a.tif"), "a.tif: 3 pages, expected one picture"),
        (
            read_image,
            lambda p: save(p / "a.png", np.dstack([RGB, GREY])),
            "a.png: partly transparent, expected opaque",
        ),
        (
            read_image,
            lambda p: save(p / "a.png", GREY, transparency=int(GREY[0, 1])),
            "a.png: partly transparent, expected opaque",
        ),
        (read_image, lambda p: p / "a.png", "a.png: no such file"),
        (read_image, lambda p: truncate(save(p / "a.png", NOISE), 0), "a.png: the file is empty"),
        (
            read_label,
            lambda p: save(p / "a.png", NOISE),
            "a.png: a photograph of 1600 colours, expected a mask of label values",
        ),
        (
            read_label,
            lambda p: save(p / "a.png", RGB // 200 * 200),
            "a.png: 3 colours, expected a mask of label values",
        ),
        (
            read_label,
            lambda p: save(p / "a.png", NOISE[..., 0]),
            "different values, expected a mask of label values, not a",
        ),
        (read_label, lambda p: save(p / "a.jpg", MASK), "JPEG blurs the values of a mask, PNG keeps them"),
    ],
)
def test_an_error_names_the_file_and_its_fault(tmp_path, read, make, message):
    path = make(tmp_path)
    with pytest.raises(ValueError) as error:
        read([path] if read is read_image else path)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert "damaged" in message or "damaged" not in str(error.value) or message == "a.tif: "


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_mask_may_have_a_value_for_each_of_many_objects(tmp_path, dtype):
    # small ones, without a background between them
    objects = np.arange(100, dtype=dtype).reshape(10, 10).repeat(3, axis=0).repeat(3, axis=1)
    np.testing.assert_array_equal(as_seen(read_label(save(tmp_path / "a.png", objects))[0]), objects)


def test_types_that_pillow_lacks_are_read_where_no_value_changes(tmp_path):
    values = np.arange(16, dtype=np.int32).reshape(4, 4)
    for path in (
        unsigned(save(tmp_path / "a.tif", values)),
        save(tmp_path / "b.tif", values.astype(np.uint8), tiffinfo={339: 2}),
    ):
        np.testing.assert_array_equal(as_seen(read_image([path])[0][0]), values)


def test_a_prediction_has_the_grid_and_orientation_of_its_picture(tmp_path):
    image = save(tmp_path / "a.jpg", RGB)
    label = read_label(save(tmp_path / "m.png", GREY // 60))[0]
    write_label(tmp_path / "out.png", label, image)
    written = Image.open(tmp_path / "out.png")
    np.testing.assert_array_equal(np.asarray(written), GREY // 60)
    # Viewers show the colours of the report
    assert sorted(colour for _, colour in written.convert("RGB").getcolors()) == sorted(
        [(0, 0, 0), *(ImageColor.getrgb(raster.colour(value)) for value in (1, 2, 3))]
    )
    np.testing.assert_array_equal(read_label(tmp_path / "out.png")[0], label)
    write_label(tmp_path / "out.nii.gz", label, image)
    np.testing.assert_array_equal(read_label(tmp_path / "out.nii.gz")[0], label)
    write_channels(tmp_path / "p.nii.gz", [label.astype(np.float32)] * 2, 2, image)
    assert read_image([tmp_path / "p.nii.gz"])[0].shape == (2, 6, 4, 1)


def test_pairs_of_pictures_and_masks_form_a_dataset(tmp_path):
    for i in range(4):
        save(tmp_path / f"images/case{i}.jpg", np.roll(RGB, i, 0))
        save(tmp_path / f"masks/case{i}.png", np.where(100 + i < GREY, 255, 0).astype(np.uint8))
    dataset = folder(str(tmp_path / "images"), str(tmp_path / "masks"))
    assert [case.id for case in dataset.cases] == ["case0", "case1", "case2", "case3"]
    assert dataset.modalities == ("red", "green", "blue") and dataset.class_names == ("background", "1")
    again = folder(str(tmp_path / "images/*.jpg"), str(tmp_path / "masks/*.png"))
    assert again == dataset
    measured, errors = cached_fingerprint(dataset, tmp_path / "cache", 1)
    assert measured.spatial_dims == 2 and not errors and measured.shapes[0] == (6, 4)
    config = PreprocessingConfig(2, (1.0, 1.0), ("dataset",) * 3, measured.intensities)
    entry = fill_store(dataset, config, tmp_path / "cache", 1).read("case0")
    mean, std = measured.intensities[0]["mean"], measured.intensities[0]["std"]
    image, _ = to_canonical(*read_image(dataset.cases[0].images))
    np.testing.assert_allclose(entry.image[0], (image[0, :, :, 0] - mean) / std, atol=1e-4)
    logits = np.stack([entry.label == 0, entry.label == 1]).astype(np.float32)
    assert (restore(torch.from_numpy(logits), entry.crop_info) == label_of(dataset.cases[0])[0]).all()


def test_each_picture_of_a_folder_is_a_case(tmp_path):
    for name in ("b.png", "a.jpg"):
        save(tmp_path / "in" / name, RGB)
    assert [case.id for case in find_cases(tmp_path / "in", 3)] == ["a", "b"]
    assert list(in_folder(tmp_path / "in", "--predictions")) == ["a", "b"]
    write_label(tmp_path / "in/volume.nii.gz", np.zeros((6, 4, 1)), tmp_path / "in/b.png")
    # pictures beside a volume are previews
    assert [case.id for case in find_cases(tmp_path / "in", 3)] == ["volume"]


def test_predictions_for_pictures_are_pictures(tmp_path):
    cases = [Case("a", (save(tmp_path / "in/a.png", GREY),))]
    folder = OutputDir(tmp_path / "out", {"network": 1}, {})
    with folder.open(cases):
        for case, release in folder.claims(cases):
            write_label(folder.label(case.id), np.ones((6, 4, 1)), case.images[0])
            release()
    written = sorted(path.name for path in (tmp_path / "out").glob("[!.]*"))
    assert written == ["a.png", "prediction.json"]
    again = OutputDir(tmp_path / "out", {"network": 1}, {})
    with again.open(cases):
        assert list(again.claims(cases)) == [] and again.skipped == ["a"]
    with (
        pytest.raises(ValueError, match="holds label maps|made with other settings|other"),
        OutputDir(tmp_path / "out", {"network": 2}, {}).open(cases),
    ):
        pass


def test_a_value_to_ignore_that_a_mask_would_hide_is_refused(tmp_path):
    """A mask of 0 and 255 has class 1, whatever 255 means elsewhere."""
    for ignore, masks in ((99, [Path("m.png")]), (None, [Path("m.png")]), (255, [None, Path("m.nii.gz")])):
        raster.check_ignored([ignore], masks, 2)
    with pytest.raises(
        ValueError, match=r"^m\.png: the value to ignore must be below 100, as a mask of 0 and 255 is"
    ):
        raster.check_ignored([None, 255], [None, Path("m.png")], 2)
    raster.check_ignored([255], [Path("m.png")], 3)


def test_gif_masks_of_greys_are_values_in_any_order_of_the_palette(tmp_path):
    """As DRIVE's: two greys, of which some programs put white first."""
    mask = GREY > 100
    white_first = Image.fromarray((~mask).astype(np.uint8), "P")
    white_first.putpalette([255, 255, 255, 0, 0, 0])
    coloured = Image.fromarray(GREY // 60, "P")
    coloured.putpalette([0, 0, 0, 200, 0, 0, 0, 200, 0, 9, 9, 90, 1, 2, 3])
    for name, pixels, expected in (
        ("a.gif", mask.astype(np.uint8) * 255, mask * 255),
        ("b.gif", white_first, mask * 255),
        ("c.gif", coloured, GREY // 60),
        ("d.GIF", GREY // 60, GREY // 60),
    ):
        path = save(tmp_path / name, pixels)
        np.testing.assert_array_equal(as_seen(read_label(path)[0]), expected, err_msg=name)
    frames = [Image.fromarray(GREY + i) for i in range(2)]
    frames[0].save(tmp_path / "film.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match=r"film\.gif: 2 pages, expected one picture"):
        read_image([tmp_path / "film.gif"])


@pytest.mark.parametrize(
    ("shape", "image_turn", "mask_turn", "words"),
    [
        ((6, 6), 6, 1, 1),  # square: nobody can tell
        ((4, 6), 3, 1, 1),  # upside down: nobody can tell
        ((4, 6), 1, 2, 1),
        ((4, 6), 6, 1, 0),  # the sizes tell
        ((6, 6), 6, 6, 0),
        ((6, 6), 1, 1, 0),
    ],
)
def test_a_picture_that_exif_turns_but_not_its_mask_gets_a_word(
    tmp_path, shape, image_turn, mask_turn, words
):
    for case in range(2):
        for folder_name, turn in (("images", image_turn), ("masks", mask_turn)):
            exif = Image.Exif()
            exif[0x0112] = turn
            pixels = np.arange(case, case + shape[0] * shape[1], dtype=np.uint8).reshape(shape)
            if folder_name == "masks":
                pixels = (pixels > 9).astype(np.uint8)
                is_drawn_upright = shape == (4, 6) and image_turn == 6
                pixels = np.rot90(pixels, -1).copy() if is_drawn_upright else pixels
            save(tmp_path / folder_name / f"{case}.png", pixels, exif=exif)
    dataset = folder(str(tmp_path / "images"), str(tmp_path / "masks"))
    warnings = [warning for warning in check(dataset, 1).warnings if "EXIF" in warning]
    assert len(warnings) == 2 * words
    if words:
        expected = (
            f"case 0: {tmp_path}/masks/0.png: has EXIF orientation {mask_turn}, {tmp_path}/images/0.png has"
        )
        assert warnings[0].startswith(f"{expected} {image_turn} ")
