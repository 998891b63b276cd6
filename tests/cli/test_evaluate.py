"""`medconv evaluate`: its options, folders of label maps and tables, and errors that name options."""

import csv
import json
import os
from pathlib import Path

import pytest
from helpers import tiny
from helpers.image_level_tables import write_tables
from helpers.label_maps import folders, label_of, save_spaced, with_names


def run_main(monkeypatch, predictions, references, output, *options):
    monkeypatch.setattr("medconv.cli.evaluate.start_logging", lambda: None)
    folders = ["--predictions", predictions, "--references", references]
    return tiny.call(monkeypatch, "evaluate", *folders, "--output", output, *options)


def test_the_command_prints_a_table_and_writes_the_results(tmp_path, monkeypatch, capsys):
    predictions, references = folders(tmp_path, {"a": label_of(5)}, {"a": label_of(5)})
    output = tmp_path / "metrics.json"
    assert run_main(monkeypatch, predictions, references, output) == 0
    printed = capsys.readouterr().out
    assert "1.0000" in printed and all(
        str(tmp_path / f"metrics.{kind}") in printed for kind in ("json", "csv", "html")
    )
    assert "<h1>Evaluation of 1 case</h1>" in (tmp_path / "metrics.html").read_text()
    assert sorted(path.name for path in tmp_path.glob("*metrics*")) == [
        "metrics.csv",
        "metrics.html",
        "metrics.json",
    ]
    assert json.loads((tmp_path / "metrics.json").read_text())["mean"]["dice"] == 1
    (references / "a.nii.gz").unlink()
    assert run_main(monkeypatch, predictions, references, output) == 1
    assert "error: --references " in capsys.readouterr().err


def test_scores_of_training_cases_are_marked(tmp_path, monkeypatch, capsys):
    """As the manifest beside each set of predictions names them; in the terminal, the JSON and the report."""
    labels = {case: label_of(5, 2) for case in ("a", "b", "c")}
    (tmp_path / "other").mkdir()
    other, _ = folders(tmp_path / "other", labels, {})
    predictions, references = folders(tmp_path, labels, labels)
    entry, common = {"images": ["x"], "stamps": [None]}, {"class_names": ["background", "x", "y"]}
    for folder, trained in ((predictions, ["a", "c", "gone"]), (other, ["b"])):
        state = {"settings": {}, "cases": {"a": entry}, "overwriting": [], "train_cases": trained}
        (folder / "prediction.json").write_text(json.dumps({**common, **state}))
    output, lines = (
        tmp_path / "m.json",
        [
            "predictions: cases with names of training cases: 2 (a, c); their scores are optimistic",
            "compare: cases with names of training cases: 1 (b); their scores are optimistic",
        ],
    )
    for options, expected in (((), lines[:1]), (("--compare", other), lines)):
        assert run_main(monkeypatch, predictions, references, output, *options) == 0
        printed, page = capsys.readouterr().out.splitlines(), output.with_suffix(".html").read_text()
        assert [line for line in printed if "names of training cases" in line] == expected
        assert [f"<p>{line}</p>" in page for line in lines] == [True, len(expected) > 1]
    result = json.loads(output.read_text())
    assert result["train_cases"] == ["a", "c"] and result["compare"]["train_cases"] == ["b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--output", "metrics.csv"],
            "--output metrics.csv: expected a JSON file; CSV and HTML are written beside it",
        ),
        (
            ["--output", "labelsTr/a.nii.gz/m.json"],
            "--output labelsTr/a.nii.gz/m.json: cannot be written (File exists)",
        ),
        (["--output", "folder.json"], "--output folder.json: cannot be written (Is a directory)"),
        (["--output", "other.json"], "--output other.csv: cannot be written (Is a directory)"),
        (
            ["--output", "predictions/prediction.json"],
            "--output predictions/prediction.json: would replace predictions/prediction.json, which this "
            "evaluation reads",
        ),
        (
            ["--predictions", "predictions/{id}.nii.gz", "--output", "predictions/prediction.json"],
            "--output predictions/prediction.json: would replace predictions/prediction.json, which this "
            "evaluation reads",
        ),
        (
            ["--output", "dataset.json"],
            "--output dataset.json: would replace dataset.json, which this evaluation reads",
        ),
        (["--images", "elsewhere"], "--images elsewhere: no image of any case there, such as a.nii.gz"),
        (["--workers", 0], "--workers must be at least 1, got 0"),
        (["--images", "nowhere"], "--images=nowhere: no such folder"),
        (["--compare", "nowhere"], "--compare=nowhere: no such folder"),
        (
            ["--tolerance-mm", "2 mm"],
            "--tolerance-mm 2 mm: expected millimetres, such as 2, or NAME=MM for one class",
        ),
        (["--lesions", "0"], "--lesions must be above 0 and at most 1, got 0.0"),
        (["--tolerance-mm", "livr=2"], "--tolerance-mm: no class 'livr'; there are 1"),
    ],
)
def test_unusable_options_are_refused_before_the_work(tmp_path, monkeypatch, capsys, options, message):
    folders(tmp_path, {"a": label_of(5)}, {"a": label_of(5)})
    save_spaced(tmp_path / "elsewhere/b.nii.gz", label_of(5))
    for name in ("folder.json", "other.csv"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    paths = (Path("predictions"), Path("labelsTr"), Path("metrics.json"))
    assert run_main(monkeypatch, *paths, *options) == 1
    assert capsys.readouterr().err.strip() == f"error: {message}"
    assert not (tmp_path / "metrics.json").exists()


def test_references_may_be_the_current_folder(tmp_path, monkeypatch, capsys):
    """dataset.json is found beside `.`, and an empty imagesTr is no error."""
    _, references = folders(tmp_path, {"a": label_of(5)}, {"a": label_of(5)})
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": {"0": "background", "1": "liver"}}))
    (tmp_path / "imagesTr").mkdir()
    monkeypatch.chdir(references)
    paths = (Path("../predictions"), Path(), Path("../metrics.json"))
    assert run_main(monkeypatch, *paths) == 0, capsys.readouterr().err
    assert list(json.loads((tmp_path / "metrics.json").read_text())["per_class"]) == ["liver"]


def test_unprintable_names_are_escaped(tmp_path, monkeypatch, capfd):
    """Invalid UTF-8 in the name of a case, terminal control codes in that of a class."""
    odd = "sp\udce4t"
    predictions, references = folders(tmp_path, {odd: label_of(5)}, {odd: label_of(5), odd * 2: label_of(5)})
    with_names(predictions, "background", "\x1b[2Jliver\udce4")
    output = tmp_path / "metrics.json"
    assert run_main(monkeypatch, predictions, references, output) == 0, capfd.readouterr().err
    printed = capfd.readouterr().out
    assert "\\x1b[2Jliver\\udce4" in printed and "sp\\udce4tsp\\udce4t" in printed and "\x1b" not in printed
    assert "sp\\udce4t" in (tmp_path / "metrics.csv").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_an_error_of_the_user(tmp_path, monkeypatch, capsys):
    """Nothing of an earlier evaluation stays beside the new JSON."""
    predictions, references = folders(tmp_path, {"a": label_of(5)}, {"a": label_of(5)})
    (tmp_path / f".{os.getpid()}.metrics.csv").symlink_to("/dev/full")  # renamed once it is complete
    output = tmp_path / "metrics.json"
    earlier = [tmp_path / "metrics.csv", tmp_path / "metrics.html"]
    for path in earlier:
        path.write_text("of an earlier evaluation")
    assert run_main(monkeypatch, predictions, references, output) == 1
    message = f"error: {tmp_path}/metrics.csv: cannot be written (No space left on device)"
    assert capsys.readouterr().err.strip() == message
    assert output.exists() and not any(path.exists() for path in earlier)


def test_the_command_evaluates_tables(tmp_path, monkeypatch, capsys):
    predictions, labels, _, _ = write_tables(tmp_path)

    def call(*words):
        return tiny.call(monkeypatch, "evaluate", *words, "--output", tmp_path / "out/s.json")

    assert call("--predictions", predictions, "--labels", labels, "--split", "test") == 0
    output = capsys.readouterr().out
    assert output.startswith("8 cases of test\nAUC ") and "s.html" in output
    with (tmp_path / "out/s.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (
        len(rows) == 8
        and rows[0]["case"] == "c4"
        and rows[0]["truth/class"] == "cat"
        and "output/cat" in rows[0]
    )
    before = labels.read_bytes()
    own = ("--predictions", predictions, "--labels", labels, "--output", labels.with_suffix(".json"))
    assert tiny.call(monkeypatch, "evaluate", *own) == 1 and labels.read_bytes() == before
    assert f"would replace {labels}, which this evaluation reads" in capsys.readouterr().err
    copy = tmp_path / "copy/predictions.csv"
    copy.parent.mkdir()
    copy.write_bytes(predictions.read_bytes())
    both = ("--predictions", copy.parent, "--labels", labels, "--compare", copy.parent, "--split", "test")
    assert call(*both) == 0 and "AUC, predictions minus compare: difference 0.0000" in capsys.readouterr().out
    assert call("--predictions", predictions, "--labels", labels, "--split-column", "part") == 1
    assert "--split-column part has no effect without --split" in capsys.readouterr().err
    assert call("--predictions", predictions) == 1
    assert "--labels is needed: the table (.csv) that " in capsys.readouterr().err
    assert call("--predictions", tmp_path, "--references", tmp_path, "--split", "test") == 1
    assert "--split is for classification and regression, whose" in capsys.readouterr().err
    assert call("--predictions", tmp_path) == 1
    assert "--references is needed" in capsys.readouterr().err


def test_the_split_may_stand_in_another_column(tmp_path, monkeypatch):
    predictions, labels, *_ = write_tables(tmp_path)
    text = labels.read_text().replace("path,label,split", "path,label,part")
    labels.write_text(text.replace("testing", "val", 2))
    output = tmp_path / "scores.json"
    words = ("--predictions", predictions, "--labels", labels, "--output", output)
    assert tiny.call(monkeypatch, "evaluate", *words, "--split", "val", "--split-column", "part") == 0
    assert [row["case"] for row in json.loads(output.read_text())["cases"]] == ["c4", "c5"]


def test_the_labels_may_stand_in_another_column(tmp_path, monkeypatch):
    predictions, labels, *_ = write_tables(tmp_path)
    labels.write_text(labels.read_text().replace("path,label,split", "path,diagnosis,split"))
    output = tmp_path / "scores.json"
    words = ("--predictions", predictions, "--labels", labels, "--output", output)
    assert tiny.call(monkeypatch, "evaluate", *words, "--label-columns", "diagnosis") == 0
    assert len(json.loads(output.read_text())["cases"]) == 12
