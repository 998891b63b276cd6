"""Label maps of new images from trained networks."""

from medconv.predicting.cases import find_cases
from medconv.predicting.folder import RECORD, Folder
from medconv.predicting.predictor import Predictor

__all__ = ["RECORD", "Folder", "Predictor", "find_cases"]
