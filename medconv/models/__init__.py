"""Networks and their layers; `conf/model` names MONAI's networks themselves."""

from medconv.models.deep_supervision import DeepSupervision
from medconv.models.unet import UNet

__all__ = ["DeepSupervision", "UNet"]
