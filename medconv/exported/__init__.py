"""Exported ONNX files, read back: `load` gives what `trained.load` gives of a checkpoint."""

from medconv.exported.card import card_path, digest
from medconv.exported.loading import load

__all__ = ["card_path", "digest", "load"]
