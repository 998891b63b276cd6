"""Lightning modules: what a run optimises and measures."""

from medconv.tasks.base import Task
from medconv.tasks.segmentation import Segmentation
from medconv.tasks.whole import Classification, Regression, WholeImage

__all__ = ["Classification", "Regression", "Segmentation", "Task", "WholeImage"]
