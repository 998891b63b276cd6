"""Checks that the task fits what the dataset holds."""

from __future__ import annotations

from hydra.utils import get_object

from medconv.config import ConfigError
from medconv.models.build import Values
from medconv.targets.image_level import Outcome


def check_task(task: Values, outcome: Outcome | None, dataset: str) -> None:
    """Raises: ConfigError: a task that is not for what a dataset has; says which is."""
    kinds = getattr(get_object(str(task["_target_"])), "kinds", None)
    if kinds is None or (outcome.kind in kinds if outcome else not kinds):
        return
    has = f"{outcome.kind} of whole images ({', '.join(outcome.names[:5])})" if outcome else "label maps"
    fitting = "segmentation" if outcome is None else "regression" if outcome.kind == "numbers" else "classification"
    wanted = " or ".join(kinds) + " of whole images" if kinds else "label maps"
    raise ConfigError(
        f"task: {task['_target_']} is for {wanted}, and {dataset} has {has}; take task={fitting}"
        + ("" if outcome else ", or data=imagefolder, csv or medmnist")
    )
