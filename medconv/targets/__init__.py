"""What a network predicts: label maps, regions, classes, labels or values of whole images."""

from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.segmentation import SegmentationTargets

__all__ = ["ImageLevelTargets", "SegmentationTargets"]
