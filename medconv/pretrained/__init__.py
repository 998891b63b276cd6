"""First weights from a file: reading it, matching names, making tensors fit; and what of a network learns how fast."""

from medconv.pretrained.fitting import Layers, layers_of
from medconv.pretrained.freezing import check_factors, freeze
from medconv.pretrained.loading import load

__all__ = ["Layers", "check_factors", "freeze", "layers_of", "load"]
