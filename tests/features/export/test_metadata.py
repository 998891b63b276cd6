"""The metadata that is written beside an exported model."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import exports

from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.features.export.metadata import _inputs, metadata_path
from medconv.inference.load import load
from medconv.inference.predictor import Predictor
from medconv.utils.digests import digest


@pytest.mark.parametrize("format", exports.FORMATS)
def test_the_metadata_holds_all_that_prediction_needs(exported, format):
    path = exported.files[format]
    metadata = json.loads(metadata_path(path).read_text())
    model, written = load(exported.checkpoint), exports.read_back(path, format)
    for name in ("preprocessing", "window", "targets", "class_names", "modalities", "spacing_range_mm"):
        assert getattr(written, name) == getattr(model, name)
    assert written.seen_axes == (0, 1)
    assert metadata["sha256"] == digest(path) and metadata["format"] == format
    assert metadata["inputs"]["orientation"] == "RAS"
    assert metadata["inputs"]["dynamic"] == {"batch": True, "spatial": [True] * 3}
    assert metadata["inputs"]["divisor"] == [2, 2, 2] and ("opset" in metadata) == (format == "onnx")
    training, validation, parity = (metadata[key] for key in ("training", "validation", "parity"))
    assert (training["dataset"], training["cases"], validation["cases"]) == ("Tiny", 4, 3)
    assert set(validation["scores"]["dice_per_class"]) == {"box", "hole"}
    assert 0 <= parity["largest_difference"] <= 1e-4 and "a case of" in parity["inputs"]
    assert "case_1" not in json.dumps(parity)
    # no path of the machine that trained it
    assert str(exported.checkpoint.parent) not in json.dumps(metadata)


def test_an_onnx_file_and_its_metadata_predict_as_the_checkpoint(exported):
    image = exported.images / "case_0.nii.gz"
    written = Predictor([exports.read_back(exported.files["onnx"], "onnx")])
    label, probabilities = written.label_and_probabilities(image)
    expected_label, expected = Predictor.load(exported.checkpoint).label_and_probabilities(image)
    assert (label != expected_label).mean() < 1e-3 and len(np.unique(label)) > 1
    np.testing.assert_allclose(probabilities, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("dims", "slice_axis", "convention", "orientation"),
    [(2, None, None, "RAS"), (2, 2, None, "RAS"), (3, None, None, "RAS"), (2, None, "nnunet", "as stored")],
)
def test_the_metadata_states_the_orientation(exported, dims, slice_axis, convention, orientation):
    """All images are turned, single slices too, but for nnU-Net's convention."""
    preprocessing = PreprocessingConfig(
        dims, (1.0,) * dims, ("zscore",), ({},), slice_axis, convention=convention
    )
    inputs = _inputs(
        replace(load(exported.checkpoint), preprocessing=preprocessing),
        SimpleNamespace(divisor=(8,) * dims, dynamic=(True,) * dims),
    )
    assert inputs["orientation"] == orientation
    assert ("towards right, anterior" in inputs["layout"]) == (orientation == "RAS")
    assert ("pictures" in inputs["layout"]) == (dims == 2 and slice_axis is None)
