"""medconv/features/report/: the page, its template, and pictures of label maps that differ."""

import base64
import csv
import gzip
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jinja2
import numpy as np
import pytest
from helpers.label_maps import dataset, folders, label, label_of, save
from PIL import Image

from medconv.data.io.manifest import MANIFEST
from medconv.evaluation import segmentation
from medconv.evaluation.labels import images_of
from medconv.evaluation.results import table, write
from medconv.evaluation.segmentation import evaluate
from medconv.features.report import overlays, rendering, segmentation_report
from medconv.features.report.overlays import case_png
from medconv.features.report.segmentation_report import page as page_of
from medconv.metrics.segmentation import CORE_METRICS, MetricSelection
from medconv.targets.label_map import LabelMapTargets

NASTY = '<script>alert("x")</script>&\'"'
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Every start tag with its attributes, and whether tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags = []
        self.open = []
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


def test_the_page_is_self_contained(tmp_path):
    text = page_of(evaluate(*dataset(tmp_path), tmp_path / "other"))
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


def test_the_page_shows_scores_and_the_worst_cases_first(tmp_path):
    evaluation = evaluate(*dataset(tmp_path))
    page = Page(page_of(evaluation))
    dice = evaluation.result["statistics"]["1"]["dice"]
    assert f"{dice['mean']:.3f} ± {dice['sd']:.3f}" in page.text
    assert f"[{dice['low']:.3f}, {dice['high']:.3f}]" in page.text
    assert list(re.findall(r"(\w) · Dice 0|(\w) · Dice 1", page.text)) == [("c", ""), ("b", ""), ("", "a")]
    assert len(page.pictures()) == 3
    assert "image, reference, prediction" in page.text
    assert "Comparison" not in page.text


def test_pictures_have_distances_in_pixels_and_no_volumes(tmp_path):
    for name in ("predictions", "references"):
        (tmp_path / name).mkdir()
        pixels = np.zeros((30, 40), np.uint8)
        pixels[10:20, 5:15] = 1
        Image.fromarray(pixels).save(tmp_path / name / "a.png")
    evaluation = evaluate(tmp_path / "predictions", tmp_path / "references")
    page = Page(page_of(evaluation))
    assert "HD95, px" in page.text and "surface Dice at 1 px" in page.text
    assert "HD95, mm" not in page.text and "Volume error, ml" not in page.text
    assert "HD95 px  ASD px" in evaluation.score_lines()[0]
    # A spacing that was stated is in mm, and so is that of a volume that a picture is the reference of
    assert replace(evaluation, states_spacing=True).length_unit == "mm"
    of_volumes = {case: (reference, Path("a.nii.gz")) for case, (reference, _) in evaluation.files.items()}
    assert replace(evaluation, files=of_volumes).length_unit == "mm"


def test_names_cannot_become_html(tmp_path):
    case = "x<img src=q onerror=alert(1)>'&"
    predictions, references = dataset(tmp_path / "<img src=q onerror=alert(2)>", (case,))
    other = predictions.with_name("other")
    for folder in (predictions, other):
        (folder / MANIFEST).write_text(json.dumps({"class_names": ["background", NASTY, "two"]}))
    page = Page(page_of(evaluate(predictions, references, other, {NASTY: 2.0})))
    assert not [tag for tag, attrs in page.tags if tag == "script" or "onerror" in attrs]
    for name in (NASTY, case, str(predictions), str(references), str(other)):
        assert name in page.text


def test_missing_and_damaged_images_are_left_out(tmp_path):
    predictions, references = dataset(tmp_path, images=False)
    assert "image, reference" not in Page(page_of(evaluate(predictions, references))).text
    for case in "ab":
        save(tmp_path / "mine" / f"{case}.nii.gz", np.ones((12, 14, 10), np.float32))
    (tmp_path / "mine/b.nii.gz").write_bytes(gzip.compress(b"no image"))
    text = Page(page_of(evaluate(predictions, references, images=tmp_path / "mine"))).text
    assert "image, reference, prediction" in text
    assert (
        f"reference, prediction; without the image: {tmp_path}/mine/b.nii.gz: not a readable NIfTI file"
        in text
    )


def test_a_class_without_voxels_is_undefined(tmp_path):
    for name in ("labelsTr", "out"):
        save(tmp_path / name / "a.nii.gz", 0 * label(1))
    (tmp_path / "out" / MANIFEST).write_text('{"class_names": ["background", "one"]}')
    page = Page(page_of(evaluate(tmp_path / "out", tmp_path / "labelsTr")))
    assert "no case has a defined Dice" in page.text and "undefined in every case" in page.text


def test_significant_differences_are_green_where_the_first_set_is_better():
    """Higher Dice, lower distances, and lower absolute volume errors are better."""
    better = {"dice": 0.1, "hd95_mm": -2.0, "volume_error": -0.1, "volume_error_ml": -1.0}
    for metric in (metric for metric in CORE_METRICS if metric.name in better):
        row = {"difference": better[metric.name], "p_holm": 0.01}
        assert segmentation_report._better(row, metric) == "good"
        assert segmentation_report._better({**row, "difference": -row["difference"]}, metric) == "bad"
        for p in (0.05, None):
            assert segmentation_report._better({**row, "p_holm": p}, metric) == ""


def test_lesions_are_in_the_table_the_files_and_the_report(tmp_path):
    """Of two cases one lesion each; the one that is missed has 0 in all scores, the other is found by 0.4."""
    true_labels = {"a": label_of(10), "b": label_of(10)}
    predictions, references = folders(tmp_path, {"a": label_of(4), "b": label_of(2)}, true_labels)
    evaluation = segmentation.evaluate(
        predictions, references, predictions, selection=MetricSelection(lesion_iou=0.3)
    )
    result = evaluation.result
    assert result["lesion_iou"] == 0.3
    assert [row["lesion_f1"] for row in result["cases"]] == [{"1": 1.0}, {"1": 0.0}]
    described = result["statistics"]["1"]["panoptic_quality"]
    assert (described["mean"], described["low"], described["high"]) == (0.2, 0.0, 0.4)
    assert result["comparison"]["1"]["lesion_f1"]["difference"] == 0.0
    header, row, *_ = (line.split() for line in table(evaluation).splitlines())
    assert header[-5:] == ["%", "lesion", "F1", "PQ", "cases"] and row[-3:] == ["0.5000", "0.2000", "2"]
    write(evaluation, tmp_path / "metrics.json")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [row["lesion_sensitivity"] for row in csv.DictReader(file)] == ["1.0", "0.0"] * 2
    page = page_of(evaluation)
    assert "Panoptic quality" in page and "lesions match from an intersection over union of 0.3 on" in page
    without = segmentation.evaluate(predictions, references)
    assert without.result["lesion_iou"] is None and "Lesion" not in page_of(without)
    assert "lesion_f1" not in without.result["mean"]


def test_centrelines_are_in_the_table_the_files_and_the_report(tmp_path):
    true_labels = {"a": label_of(10), "b": label_of(10)}
    predictions, references = folders(tmp_path, {"a": label_of(10), "b": label_of(0)}, true_labels)
    evaluation = segmentation.evaluate(predictions, references, selection=MetricSelection(centreline=True))
    assert evaluation.result["centreline"] is True
    assert [row["cldice"]["1"] for row in evaluation.result["cases"]] == [1.0, 0.0]
    header, row, *_ = (line.split() for line in table(evaluation).splitlines())
    assert header[-2:] == ["clDice", "cases"] and row[-2:] == ["0.5000", "2"]
    assert "clDice" in page_of(evaluation)
    assert "clDice" not in page_of(segmentation.evaluate(predictions, references))


def test_a_picture_shows_where_label_maps_differ(tmp_path):
    """The plane with the one wrong voxel is shown, in the colour of class 3; ignored voxels do not count."""
    reference, prediction = label(6), label(6)
    prediction[4, 5, 7] = 3
    reference[8:, 10:, :3], prediction[8:, 10:, :3] = 9, 0
    paths = [save(tmp_path / "r.nii.gz", reference), save(tmp_path / "p.nii.gz", prediction)]
    targets = LabelMapTargets(("one", "two", "three"), ((1,), (2,), (3,)), 9)
    two_ignored = replace(targets, ignore=8, also_ignored=(9,))
    for ignoring, is_shown in ((targets, True), (two_ignored, True), (replace(targets, ignore=None), False)):
        pixels = np.asarray(Image.open(io.BytesIO(case_png(paths, None, ignoring))), int)
        green = (pixels[..., 1] > pixels[..., 0] + 30) & (pixels[..., 1] > pixels[..., 2] + 10)
        assert green.any() == is_shown


def test_images_are_named_by_the_manifest_or_lie_beside_the_labels(tmp_path):
    out, references = dataset(tmp_path)
    image = tmp_path / "imagesTr/a_0000.nii.gz"
    assert images_of(out, references, None, ["a", "z"]) == {"a": image}
    assert images_of(out, tmp_path / "other", None, ["a"]) == {}
    (tmp_path / "series").mkdir()  # of DICOM slices
    entries = {
        "a": {"images": [str(image)]},
        "d": {"images": [f"{tmp_path}/series#2"]},
        "b": {"images": ["gone.nii.gz"]},
        "c": {"images": []},
    }
    (out / MANIFEST).write_text(json.dumps({"cases": entries}))
    expected = {"a": image, "d": tmp_path / "series#2"}
    assert images_of(out, tmp_path / "other", None, ["a", "b", "c", "d"]) == expected
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


@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        (None, {}, "\N{EN DASH}"),
        (3, {}, "3"),
        (0.12345, {}, "0.123"),
        (-0.5, {"digits": 1}, "\N{MINUS SIGN}0.5"),
        (0.5, {"digits": 2, "signed": True}, "+0.50"),
        (-0.5, {"digits": 2, "signed": True}, "\N{MINUS SIGN}0.50"),
    ],
)
def test_numbers_have_a_true_minus_sign_and_a_dash_for_none(value, options, text):
    assert rendering.number(value, **options) == text


def test_a_template_without_its_values_is_an_error():
    with pytest.raises(jinja2.UndefinedError):
        rendering.render("segmentation_report.html.j2")


def test_shares_are_shown_in_per_cent_and_other_numbers_as_they_are():
    by_unit = {metric.unit: metric for metric in CORE_METRICS}
    assert segmentation_report._number(0.1234, by_unit["%"], signed=True) == "+12.34"
    assert segmentation_report._number(0.1234, by_unit["mm"]) == "0.12"
    assert segmentation_report._number(0.1234, by_unit[""]) == "0.123"
    result = {
        "per_class": ["liver"],
        "cases": [{"case": "a", by_unit["%"].name: {"liver": 0.25}, by_unit["mm"].name: {"liver": 0.25}}],
    }
    series = [segmentation_report._series(result, by_unit[unit])[0].values for unit in ("%", "mm")]
    assert series == [{"a": 25}, {"a": 0.25}]


def test_pictures_have_a_margin_of_10_mm_around_the_foreground():
    labels = np.zeros((1, 60, 60, 30), np.uint8)
    labels[0, 30, 30, 1] = 1
    box = overlays._foreground_box(labels, (1.0, 2.0, 5.0))
    assert [(side.start, side.stop) for side in box] == [(20, 41), (25, 36), (0, 4)]
