"""medconv/features/report/overlays.py: which planes and colours a picture has, and where images are prediction."""

import io
import json

import numpy as np
from helpers.label_maps import dataset, label, save
from PIL import Image

from medconv.evaluation.labels import images_of
from medconv.features.report.overlays import case_png
from medconv.inference.output import MANIFEST


def test_a_picture_shows_where_label_maps_differ(tmp_path):
    """The plane with the one wrong voxel is shown, in the colour of class 3; ignored voxels do not count."""
    reference, prediction = label(6), label(6)
    prediction[4, 5, 7] = 3
    reference[8:, 10:, :3], prediction[8:, 10:, :3] = 9, 0
    paths = [save(tmp_path / "r.nii.gz", reference), save(tmp_path / "p.nii.gz", prediction)]
    for ignore, is_shown in ((9, True), (None, False)):
        pixels = np.asarray(Image.open(io.BytesIO(case_png(paths, None, ignore))), int)
        green = (pixels[..., 1] > pixels[..., 0] + 30) & (pixels[..., 1] > pixels[..., 2] + 10)
        assert green.any() == is_shown


def test_images_are_named_by_the_manifest_or_lie_beside_the_labels(tmp_path):
    out, references = dataset(tmp_path)
    image = tmp_path / "imagesTr/a_0000.nii.gz"
    assert images_of(out, references, None, ["a", "z"]) == {"a": image}
    assert images_of(out, tmp_path / "other", None, ["a"]) == {}
    entries = {"a": {"images": [str(image)]}, "b": {"images": ["gone.nii.gz"]}, "c": {"images": []}}
    (out / MANIFEST).write_text(json.dumps({"cases": entries}))
    assert images_of(out, tmp_path / "other", None, ["a", "b", "c"]) == {"a": image}
    for odd in ("{", "[]", '{"cases": [1]}', '{"cases": {"a": {"images": [5]}}}'):
        (out / MANIFEST).write_text(odd)
        assert images_of(out, tmp_path / "other", None, ["a"]) == {}


def test_a_reference_of_0_and_255_is_drawn_like_a_prediction_of_0_and_1(tmp_path):
    paths = []
    for value in (255, 1):
        pixels = np.zeros((30, 40), np.uint8)
        pixels[10:20, 5:15] = value
        paths.append(tmp_path / f"{value}.png")
        Image.fromarray(pixels).save(paths[-1])
    assert case_png(paths, None) == case_png([paths[1]] * 2, None)
