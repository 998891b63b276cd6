"""medconv/targets/image_level.py: values of cases, outputs of networks, and content of files."""

from typing import Any

import pytest
import torch

from medconv.targets import Targets
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.multiclass import MulticlassTargets
from medconv.targets.multilabel import MultilabelTargets
from medconv.targets.regression import RegressionTargets

CLASSES = MulticlassTargets(("a", "b", "c"))
FINDINGS = MultilabelTargets(("x", "y"))
NUMBERS = RegressionTargets(("age", "weight"))


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
def test_values_of_a_case_fit_the_kind(targets: ImageLevelTargets, values: list[float], reason: str) -> None:
    assert targets.invalid_reason(values) == reason


def test_decode_gives_probabilities_or_numbers() -> None:
    logits = torch.tensor([[0.0, 1.0, -2.0], [3.0, 3.0, 3.0]], dtype=torch.bfloat16)
    probabilities = CLASSES.decode(logits)
    torch.testing.assert_close(
        probabilities, logits.float().exp() / logits.float().exp().sum(1, keepdim=True)
    )
    torch.testing.assert_close(FINDINGS.decode(logits), 1 / (1 + (-logits.float()).exp()))
    assert torch.equal(NUMBERS.decode(logits), logits.float()) and probabilities.dtype == torch.float32


@pytest.mark.parametrize("targets", [CLASSES, FINDINGS, NUMBERS])
def test_targets_return_from_a_file(targets: ImageLevelTargets) -> None:
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
def test_invalid_content_of_a_file_is_refused(content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageLevelTargets.from_plain(content)
