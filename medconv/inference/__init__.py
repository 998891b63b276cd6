"""From a checkpoint to predictions: loading, sliding window, test-time augmentation, post-processing."""

from medconv.inference.load import LoadedModel
from medconv.inference.predictor import Predictor

__all__ = ["LoadedModel", "Predictor"]
