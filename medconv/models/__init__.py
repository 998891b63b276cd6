"""Networks, their layers and pretrained weights; MONAI's networks are used by their own names in
`conf/model`.
"""

from medconv.models.deep_supervision import DeepSupervision
from medconv.models.encoder import Encoder
from medconv.models.monai_networks import DenseNet, EfficientNet, SEResNet
from medconv.models.unet import UNet

__all__ = ["DeepSupervision", "DenseNet", "EfficientNet", "Encoder", "SEResNet", "UNet"]
