"""medconv/evaluation/image_level.py, answers.py, whole_report.py: tables against each other, their numbers
and pages, and faults.
"""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import tiny
from PIL import Image

from medconv.data.case import Case
from medconv.evaluation import image_level as evaluation_image_level
from medconv.evaluation import tables as evaluation_tables
from medconv.evaluation.image_level_report import write_report
from medconv.inference.output_table import OutputTable
from medconv.metrics import image_level
from medconv.targets.image_level import ImageLevelTargets

NASTY = '<img src=x onerror="alert(1)">'
CLASSES = ImageLevelTargets("multiclass", ("cat", NASTY))


def write(path: Path, *lines: list[Any]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


def tables(root: Path, cases: int = 12) -> tuple[Path, Path, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    second = rng.random(cases).round(3)
    outputs, truth = np.stack([1 - second, second], 1), (np.arange(cases) % 2).astype(float)
    evaluation_tables = [[f"c{i}", CLASSES.names[o.argmax()], *o] for i, o in enumerate(outputs)]
    labels = [
        [f"images/c{i}.png", CLASSES.names[int(t)], "train" if i < 4 else "testing"]
        for i, t in enumerate(truth)
    ]
    predictions = write(root / "predictions.csv", ["case", "predicted", *CLASSES.names], *evaluation_tables)
    return (
        predictions,
        write(root / "labels.csv", ["path", "label", "split"], *labels),
        outputs,
        truth[:, None],
    )


def test_numbers_are_those_of_scoring(tmp_path: Path) -> None:
    predictions, labels, outputs, truth = tables(tmp_path)
    result = evaluation_image_level.evaluate(predictions, labels)
    assert result["mean"] == image_level.measure(CLASSES, outputs, truth)
    assert result["intervals"]["auc"] == list(image_level.intervals(CLASSES, outputs, truth)["auc"])
    assert result["per_class"] == image_level.per_name(CLASSES, outputs, truth)
    part = evaluation_image_level.evaluate(predictions, labels, part="test")
    assert (
        part["mean"] == image_level.measure(CLASSES, outputs[4:], truth[4:])
        and part["cases"][0]["case"] == "c4"
    )
    json.dumps(result, allow_nan=False)


def test_findings_and_numbers_without_a_record(tmp_path: Path) -> None:
    evaluation_tables = write(
        tmp_path / "p.csv", ["case", "a", "b"], ["x", 0.2, 0.9], ["y", 0.8, 0.1], ["z", 0.5, 0.6]
    )
    findings = write(tmp_path / "f.csv", ["case", "a", "b"], ["x", 0, 1], ["y", 1, 0], ["z", 1, 1])
    numbers = write(tmp_path / "n.csv", ["case", "a", "b"], ["x", 0.3, 1], ["y", 1, 0], ["z", 1, 1])
    assert (
        evaluation_image_level.evaluate(evaluation_tables, findings)["image_targets"]["kind"] == "multilabel"
    )
    result = evaluation_image_level.evaluate(evaluation_tables, numbers)
    assert result["image_targets"]["kind"] == "regression"
    assert result["mean"]["mae"] == pytest.approx(np.mean([0.1, 0.1, 0.2, 0.1, 0.5, 0.4]))
    assert "mean absolute error" in evaluation_image_level.table(result) and "R2" in write_report(result, {})


@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
def test_names_that_are_columns_already(tmp_path: Path, kind: str) -> None:
    """What `predict` writes of classes `case` and `control` is read as it was."""
    image_targets = ImageLevelTargets(kind, ("case", "control", "predicted"))  # type: ignore[arg-type]
    outputs = np.array([[0.2, 0.7, 0.1], [0.5, 0.3, 0.2]])
    folder = OutputTable(tmp_path, image_targets, {}, {})
    (tmp_path / "a.png").touch()
    cases = [Case(name, (tmp_path / "a.png",)) for name in ("x", "y")]
    with folder.open(cases):
        folder.add(cases, outputs)
    found = evaluation_tables.read_predictions(tmp_path / "predictions.csv", "--predictions")
    assert found.image_targets == image_targets and list(found.outputs) == ["x", "y"]
    np.testing.assert_allclose(np.stack(list(found.outputs.values())), outputs)
    if kind == "multilabel":
        labels = write(
            tmp_path / "l.csv", ["path", *image_targets.names], ["x.png", 1, 0, 0], ["y.png", 1, 1, 0]
        )
        assert evaluation_tables.read_truth(labels, image_targets).values == {"x": (1, 0, 0), "y": (1, 1, 0)}


def test_comparison_is_over_the_cases_that_both_have(tmp_path: Path) -> None:
    predictions, labels, outputs, truth = tables(tmp_path)
    others = np.array([[0.5, 0.5], [0.9, 0.1], [0.3, 0.7], [0.6, 0.4], [0.2, 0.8]])
    rows = [[f"c{i}", "cat", *o] for i, o in enumerate(others)]
    second = write(tmp_path / "other.csv", ["case", "predicted", *CLASSES.names], *rows)
    result = evaluation_image_level.evaluate(predictions, labels, second)
    assert result["comparison"] == image_level.paired(CLASSES, outputs[:5], others, truth[:5])
    assert result["compare"]["cases"] == 5 and "5 cases that both have" in write_report(result, {})


def test_the_page_stands_alone_and_names_cannot_become_html(tmp_path: Path) -> None:
    predictions, labels, outputs, truth = tables(tmp_path)
    (tmp_path / "images").mkdir()
    for number in range(11):
        pixels = np.random.default_rng(number).integers(0, 255, (9, 7, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/c{number}.png")
    (tmp_path / "images/c11.png").write_text("no picture")
    result = evaluation_image_level.evaluate(predictions, labels)
    text = write_report(result, {case: Path(path) for case, path in result["images"].items()})
    assert NASTY not in text and "&lt;img src=x" in text
    assert not re.findall(r"https?://|url\(|<script|<link", text)
    assert text.count("data:image/png;base64,") == 3 + 11 and "without the image: " in text
    wrong = image_level.errors(CLASSES, outputs, truth)
    assert re.findall(r"<h3>(c\d+) · error", text)[0] == f"c{wrong.argmax()}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p, q: p.unlink(), r"--predictions .*predictions.csv: no such file, expected a table \(CSV\)"),
        (lambda p, q: write(p, ["name", "x"], ["a", 1]), "no column 'case', expected a table as medconv "
                                                         "predict writes it"),
        (lambda p, q: write(p, ["case", "predicted", "cat", "dog"], ["c0", "cat", 1, "high"]), "row 2: column 'dog' must hold a finite "
                                                                                               "number, got "
                                                                                               "'high'"),
        (lambda p, q: write(p, ["case", "predicted", "cat", "dog"], ["c0", "cat", 1.5, 0]), "row 2: expected probabilities, from 0 "
                                                                                            "to 1"),
        (lambda p, q: write(p, ["case", "predicted", "cat", "dog"], *[["c0", "cat", 1, 0]] * 2), "row 3: case c0 is there "
                                                                                                 "twice"),
        (lambda p, q: write(q, ["path", "label"], ["c0.png", "mouse"]), "labels.csv, row 2: 'mouse' is not a class "
                                                                        "of the predictions; they are cat"),
        (lambda p, q: write(q, ["path", "kind"], ["c0.png", "cat"]), "no column 'label'; it has path, kind"),
        (lambda p, q: write(q, ["label"], ["cat"]), "a column 'case' or 'path' is needed"),
        (lambda p, q: write(q, ["path", "label"], ["c0.png", "cat"]), "no row for c1, c2, c3"),
        (lambda p, q: write(q, ["path", "label"], ["other.png", "cat"]), "none of the cases of .*predictions.csv, "
                                                                         "such as c0"),
        (lambda p, q: (p.parent / "prediction.json").write_text('{"image_targets": {"kind": "multiclass", '
                                                                '"names": ["a", '
                                                                '"b"]}}'), "its columns are cat, .*, "
                                                                           "but prediction.json beside it has a, "
                                                                           "b"),
    ],
)  # fmt: skip
def test_faults_of_tables(tmp_path: Path, change: Any, said: str) -> None:
    predictions, labels, _, _ = tables(tmp_path)
    change(predictions, labels)
    with pytest.raises(ValueError, match=said):
        evaluation_image_level.evaluate(predictions, labels)


def test_a_part_without_a_row(tmp_path: Path) -> None:
    predictions, labels, _, _ = tables(tmp_path)
    with pytest.raises(ValueError, match="no row whose column 'split' is val"):
        evaluation_image_level.evaluate(predictions, labels, part="val")
    with pytest.raises(ValueError, match="no column 'fold'; it has path, label, split"):
        evaluation_image_level.evaluate(predictions, labels, part="val", split="fold")


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    predictions, labels, _, _ = tables(tmp_path)

    def call(*words: object) -> int:
        return tiny.call(monkeypatch, "evaluate", *words, "--output", tmp_path / "out/s.json")

    assert call("--predictions", predictions, "--labels", labels, "--split", "test") == 0
    said = capsys.readouterr().out
    assert said.startswith("8 cases of test\nAUC ") and "s.html" in said
    with (tmp_path / "out/s.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (
        len(rows) == 8
        and rows[0]["case"] == "c4"
        and rows[0]["truth/class"] == "cat"
        and "output/cat" in rows[0]
    )
    assert call("--predictions", predictions) == 1
    assert "are measured against --labels" in capsys.readouterr().err
    assert call("--predictions", tmp_path, "--references", tmp_path, "--split", "test") == 1
    assert "--split is for classification and regression" in capsys.readouterr().err
    assert call("--predictions", tmp_path) == 1
    assert "--references is needed" in capsys.readouterr().err
