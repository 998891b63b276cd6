"""What a network predicts: label maps, regions, multiclass, multilabel, regression."""

from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.segmentation import SegmentationTargets

__all__ = ["ImageLevelTargets", "SegmentationTargets"]
