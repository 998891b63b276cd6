"""medconv/training/callbacks/worst_cases.py: labels and scores as text, and which cases are the worst."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from medconv.targets.image_level import ImageLevelTargets
from medconv.training.callbacks.worst_cases import WorstCases, label_text, prediction_text, score_table

CLASSES = ImageLevelTargets("multiclass", ("a", "b"))
FINDINGS = ImageLevelTargets("multilabel", ("left", "right"))
VALUES = ImageLevelTargets("regression", ("age", "volume"))


@pytest.mark.parametrize(
    ("image_targets", "values", "text"),
    [
        (CLASSES, [1.0], "b"),
        (FINDINGS, [1.0, 1.0], "left, right"),
        (FINDINGS, [0.0, 0.0], "nothing"),
        (VALUES, [61.234567, 900.0], "age 61.23, volume 900"),
    ],
)
def test_labels_as_text(image_targets: ImageLevelTargets, values: Sequence[float], text: str) -> None:
    assert label_text(image_targets, values) == text


@pytest.mark.parametrize(
    ("image_targets", "outputs", "text"),
    [
        (CLASSES, [0.7, 0.3], "a 0.70"),
        (FINDINGS, [0.2, 0.51], "right 0.51"),
        (FINDINGS, [0.2, 0.5], "nothing"),
        (VALUES, [61.234567, 900.0], "age 61.23, volume 900"),
    ],
)
def test_predictions_as_text(image_targets: ImageLevelTargets, outputs: Sequence[float], text: str) -> None:
    assert prediction_text(image_targets, outputs) == text


def test_the_table_has_scores_and_the_cases_of_each_class() -> None:
    outputs = np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
    lines = score_table(CLASSES, outputs, np.array([[0.0], [0.0], [1.0]])).splitlines()
    assert lines[0] == "3 cases, multiclass" and "| accuracy | 1.0000 |" in lines
    assert lines[-2:] == ["| a | 2 |", "| b | 1 |"]


def batch(*cases: str) -> dict:
    return {
        "image": torch.randn(len(cases), 1, 8, 8),
        "label": torch.zeros(len(cases), 2),
        "case": list(cases),
    }


def test_the_worst_cases_of_all_batches_are_kept() -> None:
    worst = WorstCases(2)
    worst.update(VALUES, batch("x", "y"), torch.tensor([[1.0, 1.0], [3.0, 3.0]]))
    worst.update(VALUES, batch("z", "w"), torch.tensor([[2.0, 2.0], [0.0, 0.0]]))
    assert [(wrong.case, wrong.error) for wrong in worst.worst] == [("y", 3.0), ("z", 2.0)]


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


def test_a_network_that_cannot_be_copied_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    worst = WorstCases(1)
    two = {**batch("x", "y"), "label": torch.tensor([[0.0], [1.0]])}
    worst.update(CLASSES, two, torch.tensor([[0.9, 0.1], [0.7, 0.3]]))
    pictures = [
        list(
            worst.pictures(SimpleNamespace(image_targets=CLASSES, network=network, device="cpu"), (1.0, 1.0))
        )
        for network in (Pooled(), Uncopied())
    ]
    assert [len(of_network) for of_network in pictures] == [1, 0]
    assert pictures[0][0][0] == "worst/y (b, predicted a 0.70)"
    assert "no saliency maps of the worst cases: AssertionError" in caplog.text
