"""Lightning modules: what a run optimises and validates."""

from medconv.training.tasks.base import Task
from medconv.training.tasks.image_level import Classification, ImageLevelTask, Regression
from medconv.training.tasks.segmentation import Segmentation

__all__ = ["Classification", "ImageLevelTask", "Regression", "Segmentation", "Task"]
