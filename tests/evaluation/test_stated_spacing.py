"""medconv/evaluation/case_measurement.py: distances in the spacing that training stated."""

import json
import shutil
from contextlib import nullcontext

import pytest
from helpers.label_maps import folders, label_of

from medconv.evaluation import segmentation
from medconv.inference.output import MANIFEST


def evaluate(*arguments, **options):
    """The content of the JSON file."""
    return segmentation.evaluate(*arguments, **options).result


def test_distances_are_in_the_spacing_that_training_stated(tmp_path):
    """The headers say 1 x 2 x 3 mm."""
    predictions, references = folders(tmp_path, {"a": label_of(4)}, {"a": label_of(8)})
    before = evaluate(predictions, references)["cases"][0]
    settings = {"source_spacing_mm": {"a": [2, 4, 6]}}
    manifest = {"settings": settings, "overwriting": [], "cases": {}, "class_names": ["background", "1"]}
    (predictions / MANIFEST).write_text(json.dumps(manifest))
    after = evaluate(predictions, references)["cases"][0]
    assert after["hd95_mm"]["1"] == 2 * before["hd95_mm"]["1"] > 0
    assert after["volume_ml"]["1"] == pytest.approx(8 * before["volume_ml"]["1"])
    others = tmp_path / "others"
    shutil.copytree(predictions, others)
    (others / MANIFEST).write_text(json.dumps(manifest | {"settings": {}}))
    for first, second in ((predictions, others), (others, predictions)):  # of the same references
        both = evaluate(first, references, second)
        distances = [part["cases"][0]["hd95_mm"]["1"] for part in (both, both["compare"])]
        assert distances == [after["hd95_mm"]["1"]] * 2
    for spacing, agrees in (([1, 1, 1], False), ([2, 4, 6], True)):  # the latter written in another way
        (others / MANIFEST).write_text(json.dumps(manifest | {"settings": {"source_spacing_mm": spacing}}))
        with nullcontext() if agrees else pytest.raises(ValueError, match=r"^case a: .* is \(2\.0, 4\.0, 6"):
            assert evaluate(predictions, references, others)["comparison"]
    settings["source_spacing_mm"] = {"a": "wide"}
    (predictions / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="prediction.json .*source_spacing_mm.* expected positive"):
        evaluate(predictions, references)
