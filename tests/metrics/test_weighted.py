"""medconv/metrics/weighted.py: equal to slow metrics and to torchmetrics'."""

import numpy as np
import pytest
import torch
import torchmetrics.functional as torchmetrics
import torchmetrics.functional.classification as torch_classes
from helpers.image_level_outputs import FINDINGS, FOUR, NUMBERS, TWO, drawn, slow_metrics

from medconv.metrics import bootstrap, image_level
from medconv.targets.image_level import ImageLevelTargets


@pytest.mark.parametrize("cases", [1, 3, 60])
@pytest.mark.parametrize("targets", [TWO, FOUR, FINDINGS, NUMBERS], ids=lambda o: f"{len(o.names)} {o.kind}")
def test_metrics_equal_a_slow_implementation(targets: ImageLevelTargets, cases: int) -> None:
    for seed in range(3):
        outputs, truth = drawn(targets, cases, seed)
        metrics = image_level.measure(targets, outputs, truth)
        assert tuple(metrics) == targets.metric_names
        assert metrics == pytest.approx(slow_metrics(targets, outputs, truth), abs=1e-9)


def test_metrics_equal_those_of_torchmetrics() -> None:
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


def test_one_class_alone_has_no_auc() -> None:
    outputs, truth = drawn(TWO, 5)[0], np.ones((5, 1))
    metrics, intervals = (call(TWO, outputs, truth) for call in (image_level.measure, bootstrap.intervals))
    assert metrics["auc"] is None and metrics["accuracy"] == metrics["balanced_accuracy"]
    assert "auc" not in intervals and "accuracy" in intervals
    assert image_level.measure(FINDINGS, drawn(FINDINGS, 5)[0], np.zeros((5, 3)))["auc"] is None


def test_constant_values_have_no_correlation() -> None:
    constant, varied = np.full((7, 2), 0.1), drawn(NUMBERS, 7)[1]
    metrics = image_level.measure(NUMBERS, constant, varied)
    assert metrics["pearson"] is None and metrics["r2"] is not None and metrics["r2"] < 0
    metrics = image_level.measure(NUMBERS, varied, constant)
    assert metrics["pearson"] is None and metrics["r2"] is None and metrics["mae"] is not None
    assert set(bootstrap.intervals(NUMBERS, varied, constant)) == {"mae", "rmse"}
