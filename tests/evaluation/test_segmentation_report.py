"""medconv/evaluation/segmentation_report.py, rendering.py, overlays.py: a page that stands alone, says the
numbers, and shows the worst cases.
"""

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import nibabel as nib
import numpy as np
from PIL import Image

from medconv.evaluation.overlays import case_png, images_of
from medconv.evaluation.segmentation import evaluate, report
from medconv.inference.manifest import MANIFEST
from medconv.utils.visualization import png

NASTY = '<script>alert("x")</script>&\'"'
VOID = {"meta", "img", "br"}


def save(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, np.diag([-1.0, -1, 2, 1])), path)
    return path


def label(size: int, shape: tuple[int, ...] = (12, 14, 10)) -> np.ndarray:
    array = np.zeros(shape, np.uint8)
    array[2 : 2 + size, 3:9], array[9:11, 9:12] = 1, 2
    return array


def dataset(root: Path, cases: tuple[str, ...] = ("a", "b", "c"), images: bool = True) -> tuple[Path, Path]:
    for i, case in enumerate(cases):
        save(root / "labelsTr" / f"{case}.nii.gz", label(6))
        save(root / "out" / f"{case}.nii.gz", label(6 - i))
        save(root / "other" / f"{case}.nii.gz", label(3))
        if images:
            save(
                root / "imagesTr" / f"{case}_0000.nii.gz",
                np.random.default_rng(i).normal(size=(12, 14, 10)).astype("f4"),
            )
    return root / "out", root / "labelsTr"


class Page(HTMLParser):
    """Every start tag with its attributes, and whether tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def pictures(self) -> list[Image.Image]:
        sources = [attrs["src"] or "" for tag, attrs in self.tags if tag == "img"]
        return [
            Image.open(io.BytesIO(base64.b64decode(s.removeprefix("data:image/png;base64,"))))
            for s in sources
        ]


def test_the_page_stands_alone(tmp_path: Path) -> None:
    text = report(evaluate(*dataset(tmp_path), tmp_path / "other"))
    page = Page(text)
    assert not page.open
    assert {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object"} == set()
    links = [
        value
        for _, attrs in page.tags
        for key, value in attrs.items()
        if key in ("src", "href", "srcset", "data")
    ]
    outside = [value or "" for value in links if not (value or "").startswith("#")]
    assert len(outside) == 3 and all(value.startswith("data:image/png;base64,") for value in outside)
    assert not re.findall(r"url\(|@import|https?://", text)
    assert "prefers-color-scheme: dark" in text


def test_numbers_and_worst_cases(tmp_path: Path) -> None:
    result = evaluate(*dataset(tmp_path))
    page = Page(report(result))
    dice = result["statistics"]["1"]["dice"]
    assert f"{dice['mean']:.3f} ± {dice['sd']:.3f}" in page.text
    assert f"[{dice['low']:.3f}, {dice['high']:.3f}]" in page.text
    assert list(re.findall(r"(\w) · Dice 0|(\w) · Dice 1", page.text)) == [("c", ""), ("b", ""), ("", "a")]
    assert len(page.pictures()) == 3
    assert "image, reference, prediction" in page.text
    assert "Comparison" not in page.text


def test_names_cannot_become_html(tmp_path: Path) -> None:
    case = "x<img src=q onerror=alert(1)>'&"
    predictions, references = dataset(tmp_path / "<img src=q onerror=alert(2)>", (case,))
    other = predictions.with_name("other")
    for folder in (predictions, other):
        (folder / MANIFEST).write_text(json.dumps({"class_names": ["background", NASTY, "two"]}))
    page = Page(report(evaluate(predictions, references, other, {NASTY: 2.0})))
    assert not [tag for tag, attrs in page.tags if tag == "script" or "onerror" in attrs]
    for name in (NASTY, case, str(predictions), str(references), str(other)):
        assert name in page.text


def test_without_images_and_with_one_that_is_damaged(tmp_path: Path) -> None:
    predictions, references = dataset(tmp_path, images=False)
    assert "image, reference" not in Page(report(evaluate(predictions, references))).text
    for case in "ab":
        save(tmp_path / "mine" / f"{case}.nii.gz", np.ones((12, 14, 10), np.float32))
    (tmp_path / "mine/b.nii.gz").write_bytes(b"no image")
    text = Page(report(evaluate(predictions, references), tmp_path / "mine")).text
    assert "image, reference, prediction" in text
    assert (
        f"reference, prediction; without the image: {tmp_path}/mine/b.nii.gz: not a readable NIfTI file"
        in text
    )


def test_nothing_to_show(tmp_path: Path) -> None:
    for name in ("labelsTr", "out"):
        save(tmp_path / name / "a.nii.gz", 0 * label(1))
    (tmp_path / "out" / MANIFEST).write_text('{"class_names": ["background", "one"]}')
    page = Page(report(evaluate(tmp_path / "out", tmp_path / "labelsTr")))
    assert "no case has a defined Dice" in page.text and "undefined in every case" in page.text


def test_a_picture_shows_where_they_differ(tmp_path: Path) -> None:
    """Ignored voxels are no difference; the plane with the one that is wrong is in the picture, in the
    third class's colour.
    """
    wanted, found = label(6), label(6)
    found[4, 5, 7] = 3
    wanted[8:, 10:, :3], found[8:, 10:, :3] = 9, 0
    paths = [save(tmp_path / "r.nii.gz", wanted), save(tmp_path / "p.nii.gz", found)]
    for ignore, shown in ((9, True), (None, False)):
        pixels = np.asarray(Image.open(io.BytesIO(case_png(paths, None, ignore))))
        green = (pixels[..., 1] > pixels[..., 0] + 30) & (pixels[..., 1] > pixels[..., 2] + 10)
        assert green.any() == shown


def test_png_is_read_by_others() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 3), np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(pixels)))), pixels)


def test_images_of(tmp_path: Path) -> None:
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
