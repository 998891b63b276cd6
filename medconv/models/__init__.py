"""Networks, their layers and pretrained weights; `conf/model` names MONAI's networks themselves."""

from medconv.models.deep_supervision import DeepSupervision
from medconv.models.monai_networks import DenseNet, EfficientNet, SEResNet, UNetPlusPlus, VNet
from medconv.models.unet import Encoder, UNet

__all__ = [
    "DeepSupervision",
    "DenseNet",
    "EfficientNet",
    "Encoder",
    "SEResNet",
    "UNet",
    "UNetPlusPlus",
    "VNet",
]
