"""Folders of one's own, by patterns: from training to the report, cases keep their ids."""

import json
import shutil

import pytest
from helpers import tiny


@pytest.fixture(scope="module")
def lab(dataset, tmp_path_factory):
    """scans/CASE_t1.nii.gz and masks/CASE_seg.nii.gz."""
    folder = tmp_path_factory.mktemp("lab")
    for source, name, ending in (("imagesTr", "scans", "t1"), ("labelsTr", "masks", "seg")):
        (folder / name).mkdir()
        for file in (dataset / source).glob("*.nii.gz"):
            case = file.name.removesuffix(".nii.gz")
            shutil.copy(file, folder / name / f"{case}_{ending}.nii.gz")
    return folder


def test_cases_keep_the_ids_of_the_pattern_from_training_to_the_report(lab, tmp_path, monkeypatch, capsys):
    own = ["data=folder", f"data.images={lab}/scans/*_t1.nii.gz", f"data.labels={lab}/masks/*_seg.nii.gz"]
    tiny.train(lab, tmp_path / "run", *own)
    output = tmp_path / "predictions"
    checkpoint = tmp_path / "run/checkpoints/best.ckpt"
    words = ["--checkpoint", checkpoint, "--input", lab / "scans", "--output", output]
    assert tiny.call(monkeypatch, "predict", *words) == 0
    assert "cases with names of training cases: 4 of 7" in capsys.readouterr().out
    assert {path.name for path in output.glob("*.nii.gz")} == {f"case_{number}.nii.gz" for number in range(7)}
    words = ["--predictions", output, "--references", f"{lab}/masks/{{id}}_seg.nii.gz"]
    assert tiny.call(monkeypatch, "evaluate", *words, "--output", tmp_path / "metrics.json") == 0
    assert len(json.loads((tmp_path / "metrics.json").read_text())["train_cases"]) == 4
    assert "image, reference, prediction" in (tmp_path / "metrics.html").read_text()
