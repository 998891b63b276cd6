"""Whole images predicted, evaluated and exported, from networks that were trained on them; and commands that
are refused.
"""

import csv
import json
import math

import numpy as np
import pytest
import torch
from helpers import exports, tiny
from helpers import small_runs as smallruns
from PIL import Image

from medconv.features.export import export
from medconv.features.export.job import ExportOptions
from medconv.inference.inputs import find_cases
from medconv.inference.load import load
from medconv.inference.predictor import Predictor
from medconv.targets.label_map import LabelMapTargets


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A table of pictures, and checkpoints of classes, findings and numbers in it."""
    root = tmp_path_factory.mktemp("whole")
    table = smallruns.write_table(root / "data", {"label": "finding", "other": "other", "age": "number"})
    settings = {
        "multiclass": ("augmentation.mirror_axes=[0,1]", "task.mirror_axes=[0,1]"),
        "multilabel": ("data.label_columns=[label,other]",),
        "regression": ("data.label_columns=[age]", "data.target_type=regression"),
    }
    for kind, more in settings.items():
        smallruns.train(table, root / kind, *smallruns.OURS, *more)
    return {"table": table, **{kind: root / kind / "checkpoints/best.ckpt" for kind in settings}}


@pytest.fixture
def predicting(monkeypatch, files):
    def run(*words, source=None):
        return tiny.call(
            monkeypatch, "predict", "--input", source or files["table"], "--device", "cpu", *words
        )

    return run


def rows(folder):
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", ["multiclass", "multilabel", "regression"])
def test_as_validated(files, kind, tmp_path, predicting):
    """A prediction equals the output of validation, to the last digits, in any batches."""
    assert predicting("--checkpoint", files[kind], "--output", tmp_path, "--sw-batch-size", 5) == 0
    predictions = {row["case"]: row for row in rows(tmp_path)}
    record = torch.load(files[kind], weights_only=True)["medconv"]
    names = record["targets"]["names"]
    assert (
        list(predictions) == sorted(predictions, key=int) and len(predictions) == 18 and record["validation"]
    )
    for case, row in record["validation"].items():
        assert [float(predictions[case][name]) for name in names] == pytest.approx(
            row["outputs"], rel=1e-4, abs=1e-5
        )
    if kind == "multiclass":
        for row in predictions.values():
            assert row["predicted"] == max(names, key=lambda name: float(row[name]))
            assert sum(float(row[name]) for name in names) == pytest.approx(1)
    else:
        assert "predicted" not in predictions["0"]


def test_at_the_temperature_of_the_checkpoint(files, tmp_path, predicting):
    """Twice the temperature has the square root of the ratio of two probabilities."""
    content = torch.load(files["multiclass"], weights_only=True)
    content["medconv"]["temperature"] *= 2
    warmer = tmp_path / "warmer.ckpt"
    torch.save(content, warmer)
    ratios = []
    for number, checkpoint in enumerate((files["multiclass"], warmer)):
        assert predicting("--checkpoint", checkpoint, "--output", tmp_path / str(number)) == 0
        ratios.append([float(row["1"]) / float(row["0"]) for row in rows(tmp_path / str(number))])
    assert ratios[1] == pytest.approx(np.sqrt(ratios[0]), rel=1e-3)
    assert max(ratios[0]) > 1.1 * max(ratios[1])


@pytest.mark.parametrize("temperature", [0.5, math.nan, 1e300, 2, "2", [2.0]])
def test_a_temperature_that_cannot_be_is_refused(files, tmp_path, temperature):
    content = torch.load(files["multilabel"], weights_only=True)
    content["medconv"]["temperature"] = temperature
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"x\.ckpt: temperature: expected a number from 1 to 100, got "):
        load(tmp_path / "x.ckpt")
    content = torch.load(files["regression"], weights_only=True)
    content["medconv"]["temperature"] = temperature
    torch.save(content, tmp_path / "numbers.ckpt")
    assert load(tmp_path / "numbers.ckpt").temperature is None


def test_the_metadata_of_an_export_say_by_what_to_divide(files, tmp_path):
    content = torch.load(files["multilabel"], weights_only=True)
    content["medconv"]["temperature"] = 2.5
    torch.save(content, tmp_path / "x.ckpt")
    export.export(tmp_path / "x.ckpt", tmp_path / "x.ts", ExportOptions("torchscript"))
    outputs = json.loads((tmp_path / "x.ts.json").read_text())["outputs"]
    assert outputs["decode"].startswith("the outputs divided by the temperature, then a sigmoid")
    predictor = Predictor.load([tmp_path / "x.ckpt"])
    case_input = predictor.read(find_cases(files["table"].parent / "1.png", 1)[0])
    logits = torch.jit.load(str(tmp_path / "x.ts"))(torch.from_numpy(case_input.arrays[0])[None])
    expected = (logits / outputs["temperature"]).sigmoid()[0].detach().numpy()
    assert predictor.scores([case_input])[0].outputs == pytest.approx(expected, abs=1e-3)


def test_a_case_that_fails_takes_no_other_with_it(files, tmp_path, predicting, capsys):
    images = tmp_path / "images"
    images.mkdir()
    for number in range(4):
        (images / f"{number}.png").write_bytes((files["table"].parent / f"{number}.png").read_bytes())
    Image.new("RGB", (16, 16), (9, 99, 200)).save(images / "colours.png")
    (images / "damaged.png").write_bytes((images / "0.png").read_bytes()[:60])
    command = ("--checkpoint", files["multiclass"], "--output", tmp_path / "out")
    assert predicting(*command, source=images) == 1
    errors = capsys.readouterr().err
    assert "2 of 6 cases could not be predicted" in errors and "Traceback" not in errors
    assert (
        "colours.png: the network was trained on 1 channel (grey), found 3; save a colour picture in grey"
        in errors
        and "case damaged" in errors
    )
    before = (tmp_path / "out/predictions.csv").read_text()
    assert [row["case"] for row in rows(tmp_path / "out")] == ["0", "1", "2", "3"]
    with (tmp_path / "out/predictions.csv").open("a") as file:
        file.write("damaged,bri")  # as a process that was killed leaves it
    (images / "damaged.png").write_bytes((images / "0.png").read_bytes())
    (images / "colours.png").unlink()
    assert predicting(*command, source=images) == 0
    after = (tmp_path / "out/predictions.csv").read_text()
    assert after.startswith(before) and after.count("\n") == 6
    capsys.readouterr()
    assert predicting(*command, "--mirror-axes", "0", source=images) == 1
    assert (
        "holds results made with other settings (mirror_axes: [[0, 1]] there, [[0]] now)"
        in capsys.readouterr().err
    )
    assert predicting(*command, "--mirror-axes", "0", "--overwrite", source=images) == 0
    assert (tmp_path / "out/predictions.csv").read_text() != after


def test_what_is_refused(files, tmp_path, predicting, capsys):
    both, steps = ("--checkpoint", files["multiclass"]), tmp_path / "steps.json"
    steps.write_text(json.dumps({"targets": LabelMapTargets.of_classes(("", "a")).plain(), "steps": []}))
    for words, message in (
        ((*both, files["regression"]), "its targets differ: regression: age; there multiclass: 0, 1"),
        *(
            ((*both, *option), f"{option[0]} is for label maps; ")
            for option in (
                ("--save-probabilities",),
                ("--dicom-seg",),
                ("--overlap", 0),
                ("--postprocess", steps),
            )
        ),
        ((*both, "--sw-batch-size", 0), "--sw-batch-size must be a whole number of at least 1, got 0"),
    ):
        assert predicting(*words, "--output", tmp_path / "out") == 1
        assert message in capsys.readouterr().err
    (tmp_path / "list.csv").write_text("file\nx.png\n")
    assert predicting(*both, "--output", tmp_path / "out", source=tmp_path / "list.csv") == 1
    assert "list.csv: no column 'path', it has file" in capsys.readouterr().err


def test_evaluation_with_pictures(files, tmp_path, predicting, monkeypatch):
    """`evaluate` finds what `predict` wrote, and gives the scores of validation for the validated cases."""
    assert predicting("--checkpoint", files["multilabel"], "--output", tmp_path / "out", "--saliency") == 0
    for number in range(18):
        assert Image.open(tmp_path / f"out/saliency/{number}.png").size == (160 + 4 + 160, 160)
    words = ("--predictions", tmp_path / "out", "--labels", files["table"], "--output", tmp_path / "s.json")
    assert tiny.call(monkeypatch, "evaluate", *words) == 0
    result = json.loads((tmp_path / "s.json").read_text())
    assert (
        result["targets"] == {"kind": "multilabel", "names": ["label", "other"]}
        and len(result["cases"]) == 18
    )
    assert "Grad-CAM" in (tmp_path / "s.html").read_text()


def test_tables_may_have_the_column_of_images_of_the_training(
    files, tmp_path, predicting, monkeypatch, capsys
):
    content = torch.load(files["multiclass"], weights_only=True)
    content["medconv"]["config"]["data"]["path_column"] = "file"  # as if data.path_column=file
    torch.save(content, tmp_path / "file.ckpt")
    options = ("--checkpoint", tmp_path / "file.ckpt", "--output", tmp_path / "out")
    table = files["table"].with_name("files.csv")
    table.write_text(files["table"].read_text().replace("path,", "file,", 1))
    assert predicting(*options, source=table) == 0
    assert predicting(*options) == 0  # with `path`: the same cases, which are done
    words = ("--predictions", tmp_path / "out", "--output", tmp_path / "s.json", "--labels")
    assert tiny.call(monkeypatch, "evaluate", *words, table) == 0
    assert len(json.loads((tmp_path / "s.json").read_text())["cases"]) == 18
    other = tmp_path / "other.csv"
    other.write_text("image,label\n1.png,0\n")
    assert predicting(*options, source=other) == 1
    assert "other.csv: no column 'file' or 'path', it has image, label\n" in capsys.readouterr().err
    assert tiny.call(monkeypatch, "evaluate", *words, other) == 1
    assert "other.csv: a column 'case' or 'file' or 'path' is needed, to tell" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "format"), [("multiclass", "onnx"), ("regression", "torchscript")])
def test_exported_networks_answer_alike(files, tmp_path, kind, format):
    file = tmp_path / "model"
    export.export(files[kind], file, ExportOptions(format, case=files["table"].parent / "1.png"))
    metadata = json.loads((tmp_path / "model.json").read_text())
    assert metadata["outputs"]["targets"]["kind"] == kind and metadata["inputs"]["frame"] == [16, 16]
    exported, trained = Predictor([exports.read_back(file, format)]), Predictor.load(files[kind])
    Image.new("L", (20, 20)).save(tmp_path / "large.png")
    with pytest.raises(ValueError, match="20 x 20 pixels"):
        exported(tmp_path / "large.png")
    for image in sorted(files["table"].parent.glob("*.png")):
        np.testing.assert_allclose(exported(image), trained(image), rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"a bundle is for segmentation, this network has \w+ targets; take another format"
    ):
        export.export(files[kind], tmp_path / "bundle", ExportOptions("bundle"))
