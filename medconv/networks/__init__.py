"""Network builders; MONAI's networks are used by their own names in `conf/model`."""

from medconv.networks.encoder import Encoder
from medconv.networks.outputs import full_resolution, heads
from medconv.networks.stems import DenseNet, EfficientNet, SEResNet, stem_for
from medconv.networks.supervision import DeepSupervision
from medconv.networks.unet import UNet
from medconv.networks.units import in_units

__all__ = [
    "DeepSupervision",
    "DenseNet",
    "EfficientNet",
    "Encoder",
    "SEResNet",
    "UNet",
    "full_resolution",
    "heads",
    "in_units",
    "stem_for",
]
