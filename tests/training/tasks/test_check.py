"""medconv/training/tasks/check.py: a task for other targets than the dataset's is refused, with advice."""

from __future__ import annotations

import pytest

from medconv.config import ConfigError
from medconv.targets.image_level import ImageLevelTargets
from medconv.training.tasks.check import check_task

TASKS = "medconv.training.tasks"
CLASSES = ImageLevelTargets("multiclass", ("a", "b"))
FINDINGS = ImageLevelTargets("multilabel", ("a", "b", "c", "d", "e", "f"))
VALUES = ImageLevelTargets("regression", ("age",))


@pytest.mark.parametrize(
    ("task", "image_targets"),
    [
        (f"{TASKS}.Segmentation", None),
        (f"{TASKS}.Classification", CLASSES),
        (f"{TASKS}.Classification", FINDINGS),
        (f"{TASKS}.Regression", VALUES),
        ("torch.nn.Identity", VALUES),  # a class that does not say what it is for
    ],
)
def test_a_task_for_the_targets_passes(task: str, image_targets: ImageLevelTargets | None) -> None:
    check_task({"_target_": task}, image_targets, "data")


@pytest.mark.parametrize(
    ("name", "image_targets", "message"),
    [
        ("Segmentation", VALUES, r"label maps, but data has .* regression .*\(age\); use task=regression"),
        ("Segmentation", FINDINGS, r"has image-level multilabel targets \(a, b, c, d, e\); use task=class"),
        (
            "Regression",
            CLASSES,
            "image-level regression targets, but .* multiclass .*use task=classification",
        ),
        (
            "Classification",
            None,
            "multiclass or multilabel targets, but data has label maps; use task=segmen",
        ),
    ],
)
def test_a_task_for_other_targets_is_an_error(
    name: str, image_targets: ImageLevelTargets | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^task: {TASKS}\.{name} is for .*{message}"):
        check_task({"_target_": f"{TASKS}.{name}"}, image_targets, "data")
