"""medconv/features/image_level/views.py: labels and scores as text, and which cases are the worst."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from medconv.features.image_level import saliency
from medconv.features.image_level.multiclass import MulticlassTargets, OrdinalTargets
from medconv.features.image_level.multilabel import MultilabelTargets
from medconv.features.image_level.regression import RegressionTargets
from medconv.features.image_level.views import ImageLevelViews

CLASSES = MulticlassTargets(("a", "b"))
FINDINGS = MultilabelTargets(("left", "right"))
VALUES = RegressionTargets(("age", "volume"))


@pytest.mark.parametrize(
    ("image_targets", "values", "text"),
    [
        (CLASSES, [1.0], "b"),
        (FINDINGS, [1.0, 1.0], "left, right"),
        (FINDINGS, [0.0, 0.0], "nothing"),
        (VALUES, [61.234567, 900.0], "age 61.23, volume 900"),
    ],
)
def test_labels_as_text(image_targets, values, text):
    assert image_targets.label_text(values) == text


@pytest.mark.parametrize(
    ("image_targets", "outputs", "text"),
    [
        (CLASSES, [0.7, 0.3], "a 0.70"),
        (FINDINGS, [0.2, 0.51], "right 0.51"),
        (FINDINGS, [0.2, 0.5], "nothing"),
        (VALUES, [61.234567, 900.0], "age 61.23, volume 900"),
    ],
)
def test_predictions_as_text(image_targets, outputs, text):
    assert image_targets.prediction_text(outputs) == text


def test_the_table_has_scores_and_the_cases_of_each_class():
    outputs = np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
    lines = CLASSES.scores.text(outputs, np.array([[0.0], [0.0], [1.0]])).splitlines()
    assert lines[0] == "3 cases, multiclass" and "| accuracy | 1.0000 |" in lines
    assert lines[-2:] == ["| a | 2 |", "| b | 1 |"]


def batch(*cases):
    return {
        "image": torch.randn(len(cases), 1, 8, 8),
        "label": torch.zeros(len(cases), 2),
        "case": list(cases),
    }


def test_the_worst_cases_of_all_batches_are_kept():
    targets = RegressionTargets(("age", "volume"), (0.0, 0.0), (1.0, 1.0))
    views = ImageLevelViews(targets, 2, (1.0, 1.0))
    views.validated(batch("x", "y"), {"outputs": torch.tensor([[1.0, 1.0], [3.0, 3.0]])})
    views.validated(batch("z", "w"), {"outputs": torch.tensor([[2.0, 2.0], [0.0, 0.0]])})
    rows = {"y": {"outputs": [3.0, 3.0]}, "z": {"outputs": [2.0, 2.0]}}
    module = SimpleNamespace(network=Pooled(), device="cpu", rows=rows)
    tags = [tag for tag, _ in views.worst(module)]
    assert tags == [
        f"worst/{c} (age 0, volume 0, predicted age {n}, volume {n})" for c, n in (("y", 3), ("z", 2))
    ]


def test_the_picture_of_a_worst_case_explains_its_grade(monkeypatch):
    """Of grades, and of numbers of different units, the largest output says nothing."""
    targets = OrdinalTargets(("none", "mild", "severe", "worst"))
    shown = []
    monkeypatch.setattr(saliency, "overlay", lambda *arguments: shown.append(arguments[-1]))
    views = ImageLevelViews(targets, 1, (1.0, 1.0))
    outputs = [0.1, 0.2, 0.2, 0.5]
    views.validated({**batch("x"), "label": torch.tensor([[0.0]])}, {"outputs": torch.tensor([outputs])})
    list(views.worst(SimpleNamespace(network=Pooled(), device="cpu", rows={"x": {"outputs": outputs}})))
    assert shown == [targets.shown_output(np.array(outputs))] == [2]


class Pooled(nn.Module):
    """Class outputs from two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).relu().flatten(2).mean(2)


class Uncopied(Pooled):
    """Like sharded modules."""

    def __deepcopy__(self, memo: object) -> None:
        raise AssertionError


def test_a_network_that_cannot_be_copied_is_a_warning(caplog):
    views = ImageLevelViews(CLASSES, 1, (1.0, 1.0))
    two = {**batch("x", "y"), "label": torch.tensor([[0.0], [1.0]])}
    views.validated(two, {"outputs": torch.tensor([[0.9, 0.1], [0.7, 0.3]])})
    rows = {"y": {"outputs": [0.6, 0.4]}}  # at the temperature of the validation
    pictures = [
        list(views.worst(SimpleNamespace(network=network, device="cpu", rows=rows)))
        for network in (Pooled(), Uncopied())
    ]
    assert [len(of_network) for of_network in pictures] == [1, 0]
    assert pictures[0][0][0] == "worst/y (b, predicted a 0.60)"
    assert "no saliency maps of the worst cases: AssertionError" in caplog.text
