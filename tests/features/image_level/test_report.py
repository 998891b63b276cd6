"""medconv/features/image_level/report.py: a self-contained page with the worst cases."""

import json
import re

import numpy as np
from helpers.image_level_tables import CLASSES, NASTY, write_tables
from PIL import Image

from medconv.features.image_level.evaluation import evaluate
from medconv.features.image_level.evaluation import page as page_of
from medconv.features.image_level.multiclass import OrdinalTargets


def test_the_page_is_self_contained_and_escapes_names(tmp_path):
    predictions, labels, outputs, truth = write_tables(tmp_path)
    (tmp_path / "images").mkdir()
    for number in range(11):
        pixels = np.random.default_rng(number).integers(0, 255, (9, 7, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/c{number}.png")
    (tmp_path / "images/c11.png").write_text("no picture")
    text = page_of(evaluate(predictions, labels))
    assert NASTY not in text and "&lt;img src=x" in text
    assert not re.findall(r"https?://|url\(|<script|<link", text)
    assert text.count("data:image/png;base64,") == 3 + 12 and "without the image: " in text
    errors = CLASSES.errors(outputs, truth)
    assert re.findall(r"<h3>(c\d+) · error", text)[0] == f"c{errors.argmax()}"


def test_the_page_of_grades_shows_the_true_one(tmp_path):
    predictions, labels, *_ = write_tables(tmp_path)
    targets = OrdinalTargets(CLASSES.names).plain()
    (tmp_path / "prediction.json").write_text(json.dumps({"targets": targets}))
    evaluation = evaluate(predictions, labels)
    assert evaluation.result["mean"]["quadratic_kappa"] is not None and "<h3>c" in page_of(evaluation)
