"""Network builders; MONAI's networks are used by their own names in `conf/model`."""

from medconv.networks.outputs import full_resolution, heads
from medconv.networks.supervision import DeepSupervision
from medconv.networks.unet import UNet

__all__ = ["DeepSupervision", "UNet", "full_resolution", "heads"]
