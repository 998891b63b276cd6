"""Lightning modules: what a run optimises and measures."""

from medconv.training.tasks.base import Task
from medconv.training.tasks.image_level import Classification, Regression, WholeImage
from medconv.training.tasks.segmentation import Segmentation

__all__ = ["Classification", "Regression", "Segmentation", "Task", "WholeImage"]
