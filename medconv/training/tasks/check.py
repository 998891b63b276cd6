"""Checks that the configured task fits the dataset's targets."""

from __future__ import annotations

from hydra.utils import get_object

from medconv.config import ConfigError, Values
from medconv.targets.image_level import ImageLevelTargets


def check_task(task: Values, image_targets: ImageLevelTargets | None, dataset: str) -> None:
    """Raises: ConfigError: the task is for other targets than the dataset has; names the task to use."""
    kinds = getattr(get_object(str(task["_target_"])), "kinds", None)
    if kinds is None or (image_targets.kind in kinds if image_targets else not kinds):
        return
    expected = f"image-level {' or '.join(kinds)} targets" if kinds else "label maps"
    if image_targets is None:
        has, advice = "label maps", "task=segmentation, or data=imagefolder, csv or medmnist"
    else:
        has = f"image-level {image_targets.kind} targets ({', '.join(image_targets.names[:5])})"
        advice = f"task={'regression' if image_targets.kind == 'regression' else 'classification'}"
    raise ConfigError(f"task: {task['_target_']} is for {expected}, but {dataset} has {has}; use {advice}")
