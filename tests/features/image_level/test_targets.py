"""medconv/features/image_level/targets.py: values of cases, outputs of networks, and content of files."""

from pathlib import Path

import pytest
import torch

from medconv.data.case import Case
from medconv.data.splits import DataSplit, check_examples
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.multilabel import MultilabelTargets
from medconv.features.image_level.regression import RegressionTargets
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.targets import Targets
from medconv.targets.base import all_kinds

CLASSES = MulticlassTargets(("a", "b", "c"))
FINDINGS = MultilabelTargets(("x", "y"))
NUMBERS = RegressionTargets(("age", "weight"))
AGE = RegressionTargets(("age",))
FOLDS = [
    {"a": {"outputs": [41.0], "values": [40.0]}, "b": {"outputs": [50.0], "values": [52.0]}},
    {"c": {"outputs": [66.0], "values": [60.0]}},
]


@pytest.mark.parametrize(
    ("targets", "values", "reason"),
    [
        (CLASSES, [2.0], None),
        (CLASSES, [3.0], "expected the index of one of 3 classes, got 3"),
        (CLASSES, [0.5], "expected the index of one of 3 classes, got 0.5"),
        (CLASSES, [1.0, 0.0], "expected 1 values, got 2"),
        (FINDINGS, [0.0, 1.0], None),
        (FINDINGS, [0.0, 0.5], "expected 0 or 1 for each of x, y, got [0.0, 0.5]"),
        (NUMBERS, [-3.5, 1e6], None),
        (NUMBERS, [1.0, float("nan")], "expected finite numbers, got [1.0, nan]"),
    ],
)
def test_values_of_a_case_fit_the_kind(targets, values, reason):
    assert targets.invalid_reason(values) == reason


def test_decode_gives_probabilities_or_numbers():
    logits = torch.tensor([[0.0, 1.0, -2.0], [3.0, 3.0, 3.0]], dtype=torch.bfloat16)
    probabilities = CLASSES.decode(logits)
    torch.testing.assert_close(
        probabilities, logits.float().exp() / logits.float().exp().sum(1, keepdim=True)
    )
    torch.testing.assert_close(FINDINGS.decode(logits), 1 / (1 + (-logits.float()).exp()))
    assert torch.equal(NUMBERS.decode(logits), logits.float()) and probabilities.dtype == torch.float32


@pytest.mark.parametrize("targets", [CLASSES, FINDINGS, NUMBERS])
def test_targets_return_from_a_file(targets):
    assert ImageLevelTargets.from_plain(targets.plain()) == Targets.from_plain(targets.plain()) == targets


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"kind": "multiclass"}, "multiclass targets need names"),
        ({"kind": "label_map", "names": ["a"]}, "must be one of multiclass, .*, got 'label_map'"),
        ({"kind": "counts", "names": ["a"]}, "must be one of multiclass, multilabel, .*got 'counts'"),
        ({"kind": "multiclass", "names": ["a"]}, "too few names of multiclass"),
        ({"kind": "multilabel", "names": "ab"}, "expected a list"),
        ({"kind": "regression", "names": ["a"], "means": [1], "stds": [0]}, "mean and a positive std"),
        ({"kind": "regression", "names": ["a", "a"]}, "class names must differ from each other"),
    ],
)
def test_invalid_content_of_a_file_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        ImageLevelTargets.from_plain(content)


def test_folds_are_scored_together_and_by_their_means():
    scores = AGE.scores.over_folds(FOLDS)
    assert scores["mean"]["mae"] == pytest.approx((1 + 2 + 6) / 3)
    assert scores["mean_of_folds"]["mae"] == pytest.approx((1.5 + 6) / 2)
    lines = dict(AGE.scores.over_folds_lines(scores, cases=3))
    assert list(lines) == ["all cases", "mean of folds", "95 % from", "95 % to"]
    low, high = scores["intervals"]["mae"]
    assert (lines["95 % from"][0], lines["95 % to"][0]) == (low, high)


def test_cells_of_a_case_name_truth_and_output():
    assert AGE.scores.case_cells(FOLDS[0]["a"]) == {"truth/age": 40.0, "output/age": 41.0}
    cells = CLASSES.scores.case_cells({"values": [1.0], "outputs": [0.1, 0.7, 0.2]})
    assert cells == {"truth/class": "b", "output/a": 0.1, "output/b": 0.7, "output/c": 0.2}
    unknown = {"values": FINDINGS.label_values([1.0, float("nan")]), "outputs": [0.1, 0.7]}
    assert FINDINGS.scores.case_cells(unknown)["truth/y"] is None


def test_only_classes_and_labels_are_calibrated():
    calibrated = [name for name, kind in all_kinds().items() if kind.calibrated]
    assert sorted(calibrated) == ["multiclass", "multilabel"]
    assert all(issubclass(all_kinds()[name], ImageLevelTargets) for name in calibrated)
    rows = {"a": {"outputs": [float("nan")], "values": [40.0]}}
    assert AGE.scores.temperature(rows) is None


def test_the_summary_of_a_classifier_has_its_monitored_metric_and_a_table_of_folds_has_not():
    targets = MulticlassTargets(("a", "b"))
    rows = {"x": {"outputs": [0.9, 0.1], "values": [0.0]}, "y": {"outputs": [0.4, 0.6], "values": [1.0]}}
    summary = targets.scores.summary(rows)
    assert summary["cross_entropy"] == pytest.approx(0.3081, abs=1e-4)
    assert summary["cross_entropy"] == targets.scores.logged(rows, {})["cross_entropy"]
    columns = [name for name, _ in targets.scores.columns(summary)]
    lines = targets.scores.over_folds_lines(targets.scores.over_folds([rows]), cases=2)
    assert columns == list(targets.metric_names) and len(lines[0][1]) == len(columns)


def test_columns_name_the_numbers():
    assert RegressionTargets.from_columns(["age", "weight"], [], None).names == ("age", "weight")
    assert RegressionTargets.from_columns(["age"], [], ["years"]).names == ("years",)
    with pytest.raises(ValueError, match=r"class_names needs a name for each of age, weight, got \['a'\]"):
        RegressionTargets.from_columns(["age", "weight"], [], ["a"])


@pytest.mark.parametrize("cell", ["", "old", "nan", "inf"])
def test_a_cell_without_a_finite_number_is_named(cell):
    with pytest.raises(ValueError, match=f"column 'age' must hold a finite number, got '{cell}'"):
        RegressionTargets(("age",)).parse({"age": cell})


def test_labels_are_0_or_1():
    assert MultilabelTargets(("x", "y")).parse({"x": "1", "y": "0.0"}) == (1.0, 0.0)
    with pytest.raises(
        ValueError, match=r"column 'x' must hold 0 or 1, or .* not known, got '2'; target_type=regression"
    ):
        MultilabelTargets(("x",)).parse({"x": "2"})


def case(name, value=0, split="", group=""):
    return Case(name, (Path(name),), values=(value,), group=group, split=split)


REMEDY = "another fold"


def test_class_without_an_example_is_an_error(caplog):
    image_targets = MulticlassTargets(("no", "yes"))
    check_examples(
        DataSplit([case("a", 0), case("b", 1)], [case("c", 0), case("d", 1)], []), image_targets, REMEDY
    )
    with pytest.raises(ValueError, match="no training case has class yes, expected .*; another fold$"):
        check_examples(DataSplit([case("a", 0)], [case("c", 0), case("d", 1)], []), image_targets, REMEDY)
    with pytest.raises(ValueError, match="no validation case has class no"):
        check_examples(DataSplit([case("a", 0), case("b", 1)], [case("d", 1)], []), image_targets, REMEDY)
    check_examples(DataSplit([case("a", 0), case("b", 1)], [], []), image_targets, REMEDY)
    findings = MultilabelTargets(("x", "y"))
    neither, both, second = (Case(str(v), (), values=v) for v in ((0.0, 0.0), (1.0, 1.0), (0.0, 1.0)))
    check_examples(DataSplit([both], [neither, second], []), findings, REMEDY)
    assert "no validation case has x" in caplog.text
    with pytest.raises(ValueError, match="no training case has label x"):
        check_examples(DataSplit([second], [neither, second], []), findings, REMEDY)
    for val in ([neither, neither], [second, second]):  # no finding has an AUC
        with pytest.raises(ValueError, match="no label has both positive and negative validation cases"):
            check_examples(DataSplit([both], val, []), findings, REMEDY)
