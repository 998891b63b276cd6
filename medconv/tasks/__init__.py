"""Lightning modules: what a run optimises and measures."""

from medconv.tasks.segmentation import Segmentation

__all__ = ["Segmentation"]
