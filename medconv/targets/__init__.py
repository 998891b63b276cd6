"""What a network predicts: label maps, regions, classes, labels or values of whole images."""

from medconv.targets.image_level import Outcome
from medconv.targets.segmentation import Targets

__all__ = ["Outcome", "Targets"]
