"""medconv/features/image_level/metrics.py: against slow second implementations and torchmetrics; undefined metrics."""

import numpy as np
import pytest
import torch
import torchmetrics.functional as torchmetrics
import torchmetrics.functional.classification as torch_classes
from helpers.image_level_outputs import FINDINGS, FOUR, NUMBERS, TWO, drawn, slow_metrics
from reference import scores as reference

from medconv.features.image_level import metrics as image_level
from medconv.features.image_level.regression import RegressionTargets


@pytest.mark.parametrize("targets", [TWO, FINDINGS, NUMBERS], ids=lambda o: o.kind)
def test_without_cases_or_with_nan_metrics_are_undefined(targets):
    empty = np.zeros((0, targets.num_outputs)), np.zeros((0, targets.num_values))
    outputs, truth = drawn(targets, 4)
    for pair in (empty, (np.full_like(outputs, np.nan), truth)):
        assert set(image_level.measure(targets, *pair).values()) == {None}
        assert image_level.intervals(targets, *pair) == {}
        assert len(targets.errors(*pair)) == len(pair[1])
    assert image_level.intervals(targets, outputs[:1], truth[:1]) == {}


def test_metrics_per_class_equal_their_definitions():
    outputs, truth = drawn(FOUR, 40)
    rows = FOUR.per_name(outputs, truth)
    predicted = outputs.argmax(1)
    for index, name in enumerate(FOUR.names):
        member = truth[:, 0] == index
        assert rows[name]["cases"] == member.sum()
        assert rows[name]["auc"] == pytest.approx(reference.auc(outputs[:, index].tolist(), member.tolist()))
        assert rows[name]["sensitivity"] == pytest.approx((predicted[member] == index).mean())
        assert rows[name]["specificity"] == pytest.approx((predicted[~member] != index).mean())
        assert rows[name]["precision"] == pytest.approx(member[predicted == index].mean())
    pair = drawn(NUMBERS)
    mae = [row["mae"] for row in NUMBERS.per_name(*pair).values()]
    assert np.mean(mae) == pytest.approx(image_level.measure(NUMBERS, *pair)["mae"])


@pytest.mark.parametrize("cases", [1, 3, 60])
@pytest.mark.parametrize("targets", [TWO, FOUR, FINDINGS, NUMBERS], ids=lambda o: f"{len(o.names)} {o.kind}")
def test_metrics_equal_a_slow_implementation(targets, cases):
    for seed in range(3):
        outputs, truth = drawn(targets, cases, seed)
        metrics = image_level.measure(targets, outputs, truth)
        assert tuple(metrics) == targets.metric_names
        assert metrics == pytest.approx(slow_metrics(targets, outputs, truth), abs=1e-9)


def test_metrics_equal_those_of_torchmetrics():
    outputs, truth = drawn(FOUR)
    logits, classes = torch.tensor(outputs), torch.tensor(truth[:, 0]).long()
    metrics = image_level.measure(FOUR, outputs, truth)
    assert metrics["auc"] == pytest.approx(
        float(torch_classes.multiclass_auroc(logits, classes, 4)), abs=1e-6
    )
    assert metrics["accuracy"] == pytest.approx(
        float(torch_classes.multiclass_accuracy(logits, classes, 4, average="micro"))
    )
    assert metrics["balanced_accuracy"] == pytest.approx(
        float(torch_classes.multiclass_accuracy(logits, classes, 4))
    )
    assert metrics["f1"] == pytest.approx(float(torch_classes.multiclass_f1_score(logits, classes, 4)))
    calibration = torch_classes.multiclass_calibration_error(logits, classes, 4, n_bins=15)
    assert metrics["calibration_error"] == pytest.approx(float(calibration), abs=1e-6)
    outputs, truth = drawn(FINDINGS)
    metrics = image_level.measure(FINDINGS, outputs, truth)
    logits, labels = torch.tensor(outputs), torch.tensor(truth).long()
    assert metrics["auc"] == pytest.approx(float(torch_classes.multilabel_auroc(logits, labels, 3)), abs=1e-6)
    assert metrics["f1"] == pytest.approx(float(torch_classes.multilabel_f1_score(logits, labels, 3)))
    outputs, truth = drawn(NUMBERS)
    metrics, pair = image_level.measure(NUMBERS, outputs, truth), (torch.tensor(outputs), torch.tensor(truth))
    assert metrics["r2"] == pytest.approx(float(torchmetrics.r2_score(*pair)))
    assert metrics["pearson"] == pytest.approx(float(torchmetrics.pearson_corrcoef(*pair).mean()))
    assert metrics["mae"] == pytest.approx(float(torchmetrics.mean_absolute_error(*pair)))


def test_one_class_alone_has_no_auc():
    outputs, truth = drawn(TWO, 5)[0], np.ones((5, 1))
    metrics, intervals = (call(TWO, outputs, truth) for call in (image_level.measure, image_level.intervals))
    assert metrics["auc"] is None and metrics["accuracy"] == metrics["balanced_accuracy"]
    assert "auc" not in intervals and "accuracy" in intervals
    assert image_level.measure(FINDINGS, drawn(FINDINGS, 5)[0], np.zeros((5, 3)))["auc"] is None


def test_constant_values_have_no_correlation():
    constant, varied = np.full((7, 2), 0.1), drawn(NUMBERS, 7)[1]
    metrics = image_level.measure(NUMBERS, constant, varied)
    assert metrics["pearson"] is None and metrics["r2"] is not None and metrics["r2"] < 0
    metrics = image_level.measure(NUMBERS, varied, constant)
    assert metrics["pearson"] is None and metrics["r2"] is None and metrics["mae"] is not None
    assert set(image_level.intervals(NUMBERS, varied, constant)) == {"mae", "rmse"}


def test_samples_of_cases_with_one_value_have_no_r2():
    """Where few cases have another value, many samples have none of them; rounding made a variance of it."""
    age = RegressionTargets(("age",))
    outputs = np.array([[70.0], [70.3], [70.1], [69.9], [70.2], [70.1], [71.0]])
    truth = np.array([[70.1]] * 6 + [[71.3]])
    intervals = image_level.intervals(age, outputs, truth)
    assert intervals["r2"][0] > -1e3
    constant = np.array([[1.0] * 6 + [0.0]])
    columns = image_level.regression_metrics(outputs[:, 0], truth[:, 0], constant)
    assert np.isnan(columns["r2"]).all() and np.isnan(columns["pearson"]).all()


@pytest.mark.parametrize("targets", [FOUR, FINDINGS, NUMBERS], ids=lambda o: o.kind)
def test_intervals_equal_those_of_resampled_cases(targets):
    """A second bootstrap, sample by sample, of cases and not of counts."""
    outputs, truth = drawn(targets, 80)
    rng = np.random.default_rng(7)
    samples = [slow_metrics(targets, outputs[i], truth[i]) for i in rng.integers(80, size=(300, 80))]
    intervals = image_level.intervals(targets, outputs, truth)
    assert intervals == image_level.intervals(targets, outputs, truth)
    assert intervals != image_level.intervals(targets, outputs, truth, seed=1)
    values = image_level.measure(targets, outputs, truth)
    for name, (low, high) in intervals.items():
        expected = np.percentile([sample[name] for sample in samples], [2.5, 97.5])
        width = expected[1] - expected[0]
        assert (low, high) == pytest.approx(tuple(expected), abs=0.2 * width), name
        assert low <= values[name] <= high or name == "calibration_error"


def test_a_thousand_samples_are_computed_at_once(monkeypatch):
    columns, sizes = image_level.sample_columns, []

    def counted(*args):
        sizes.append(len(args[-1]))
        return columns(*args)

    monkeypatch.setattr(image_level, "sample_columns", counted)
    image_level.intervals(TWO, *drawn(TWO, 624))
    assert sizes == [1, 1000]


def test_paired_compares_two_sets_of_predictions():
    outputs, truth = drawn(TWO, 150)
    decided, noise = TWO._predicted(outputs), np.random.default_rng(1).dirichlet([1, 1], 150)
    worse = decided * 0.2 + outputs * 0.1 + noise * 0.7
    rows, swapped = (
        image_level.paired(TWO, outputs, worse, truth),
        image_level.paired(TWO, worse, outputs, truth),
    )
    good, bad = image_level.measure(TWO, outputs, truth), image_level.measure(TWO, worse, truth)
    for name, row in rows.items():
        assert (row["value"], row["value_compare"]) == (good[name], bad[name])
        assert row["low"] <= row["difference"] <= row["high"] or name == "calibration_error"
        assert swapped[name]["difference"] == pytest.approx(-row["difference"])
        assert swapped[name]["low"] == pytest.approx(-row["high"])
    auc = rows["auc"]
    assert auc["difference"] > 0.1 and auc["p"] == pytest.approx(2 / 1001) and auc["low"] > 0
    same = image_level.paired(TWO, outputs, outputs, truth)["auc"]
    assert (same["difference"], same["low"], same["high"], same["p"]) == (0, 0, 0, 1)
    alone = image_level.paired(TWO, outputs[:3], worse[:3], np.zeros((3, 1)))["auc"]
    assert set(alone.values()) == {None}


def test_the_log_loss_is_half_over_cases_and_half_over_groups():
    """Losses 1 and 2 in one group and 6 in another: means 3, and 3.75 of 1.5 and 6."""
    probabilities, groups = np.exp([-1.0, -2.0, -6.0]), np.array([0, 0, 1])
    assert image_level.log_loss(probabilities, groups) == pytest.approx(3.375)
