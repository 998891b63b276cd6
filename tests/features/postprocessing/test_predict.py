"""Post-processing in a prediction."""

import json

import nibabel as nib
import numpy as np
from helpers.members import call

from medconv.features.postprocessing.steps import Step, Steps
from medconv.inference.inputs import find_cases
from medconv.inference.predictor import Predictor


def voxels(path):
    return np.asarray(nib.load(path).dataobj)


def test_postprocessing_is_applied_and_recorded(exported, tmp_path, monkeypatch, capsys):
    images, checkpoint, _ = exported
    predictor = Predictor.load([checkpoint])
    steps = Steps((Step("remove_small", "box", 1e6),), predictor.targets)
    (file := tmp_path / "steps.json").write_text(
        json.dumps({"targets": predictor.targets.plain(), "steps": [step.plain() for step in steps.steps]})
    )
    path, output = images / "case_0.nii.gz", tmp_path / "out"
    assert call(monkeypatch, checkpoint, path, "--output", output, "--postprocess", file) == 0
    plain, grid = predictor(path), predictor.read(find_cases(path, 1)[0]).crops[0].grid
    processed = steps.apply(plain, grid, predictor.targets)
    np.testing.assert_array_equal(voxels(output / path.name), processed)
    assert (processed != plain).any()
    assert call(monkeypatch, checkpoint, path, "--output", output) == 1
    assert "another post-processing, or none" in capsys.readouterr().err
