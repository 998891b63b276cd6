"""Checks that the task fits what the dataset holds."""

from __future__ import annotations

from hydra.utils import get_object

from medconv.config import ConfigError
from medconv.models.build import Values
from medconv.targets.image_level import ImageLevelTargets


def check_task(task: Values, image_targets: ImageLevelTargets | None, dataset: str) -> None:
    """Raises: ConfigError: a task that is not for what a dataset has; says which is."""
    kinds = getattr(get_object(str(task["_target_"])), "kinds", None)
    if kinds is None or (image_targets.kind in kinds if image_targets else not kinds):
        return
    has = (
        f"{image_targets.kind} of whole images ({', '.join(image_targets.names[:5])})"
        if image_targets
        else "label maps"
    )
    fitting = (
        "segmentation"
        if image_targets is None
        else "regression"
        if image_targets.kind == "regression"
        else "classification"
    )
    wanted = " or ".join(kinds) + " of whole images" if kinds else "label maps"
    raise ConfigError(
        f"task: {task['_target_']} is for {wanted}, and {dataset} has {has}; take task={fitting}"
        + ("" if image_targets else ", or data=imagefolder, csv or medmnist")
    )
