"""MONAI's networks that need a change: a stem for the image size (`model=densenet`, `efficientnet`, `senet`),
outputs in the order that training expects (`unetplusplus`), dropout of channels in 2D (`vnet`).
"""

from collections.abc import Mapping
from typing import Any

from monai.networks import nets
from torch import Tensor, nn

from medconv.models.unet import CONVS


class DenseNet(nets.DenseNet):
    """MONAI's DenseNet.

    Args:
        stem: from `planning.topology.stem_for`; None: the usual one.
        Others: as MONAI's.
    """

    def __init__(
        self, spatial_dims: int, *args: Any, stem: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        super().__init__(spatial_dims, *args, **settings)
        if stem is not None:
            self.features.conv0 = _with_stem(self.features.conv0, stem)
            if stem["no_pool"]:
                self.features.pool0 = nn.Identity()


class EfficientNet(nets.EfficientNetBN):
    """MONAI's EfficientNet, randomly initialised.

    Args:
        stem: as of `DenseNet`.
        Others: as MONAI's.
    """

    def __init__(self, model_name: str, *, stem: Mapping[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(model_name, pretrained=False, **settings)
        if stem is not None and stem["stride"] == 1:  # the usual stem has a 3-kernel and no pooling
            ones = (1,) * self._conv_stem.weight[0, 0].ndim
            self._conv_stem.stride = ones
            self._conv_stem.padding = ones
            self._conv_stem_padding = nn.Identity()  # the padding was for stride 2


class SEResNet(nets.SEResNet50):
    """MONAI's SE-ResNet, randomly initialised.

    Args:
        stem: as of `DenseNet`.
        Others: as MONAI's.
    """

    def __init__(self, *, stem: Mapping[str, Any] | None = None, **settings: Any) -> None:
        settings["pretrained"] = False
        super().__init__(**settings)
        if stem is not None:
            self.layer0.conv1 = _with_stem(self.layer0.conv1, stem)
            if stem["no_pool"]:
                self.layer0.pool = nn.Identity()


class UNetPlusPlus(nets.BasicUNetPlusPlus):
    """MONAI's UNet++: logits in place of a list of one, without heads that nothing would train.

    Shape:
        (batch, in_channels, *spatial) -> (batch, out_channels, *spatial).
    Args:
        deep_supervision: return all four heads, each of the input's size, the deepest first.
        Others: as MONAI's.
    Source: Zhou et al. 2018, arXiv:1807.10165.
    """

    def __init__(self, *, deep_supervision: bool = False, **settings: Any) -> None:
        super().__init__(deep_supervision=deep_supervision, **settings)
        if not deep_supervision:
            # DDP refuses parameters without gradients
            self.final_conv_0_1 = nn.Identity()
            self.final_conv_0_2 = nn.Identity()
            self.final_conv_0_3 = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        deepest_first = super().forward(x)[::-1]
        return deepest_first if self.deep_supervision else deepest_first[0]


class VNet(nets.VNet):
    """MONAI's V-Net; in 2D its dropout drops channels too, where MONAI's drops whole samples of a batch.

    Shape:
        (batch, in_channels, *spatial) -> (batch, out_channels, *spatial).
    Args:
        as MONAI's.
    Source: Milletari et al. 2016, arXiv:1606.04797.
    """

    def __init__(self, spatial_dims: int, *args: Any, **settings: Any) -> None:
        super().__init__(spatial_dims, *args, **settings)
        if spatial_dims != 2:
            return
        # `Dropout3d` takes a batch of 2D images, which has four axes, for one 3D image of many channels.
        for name, layer in list(self.named_modules()):
            if isinstance(layer, nn.Dropout3d):
                self.set_submodule(name, nn.Dropout2d(layer.p))


def _with_stem(conv: Any, stem: Mapping[str, Any]) -> Any:
    """The convolution with another kernel and stride and new weights; unchanged if they are equal already."""
    size = stem["kernel_size"]
    stride = stem["stride"]
    spatial_dims = len(conv.kernel_size)
    has_size = conv.kernel_size == (size,) * spatial_dims
    has_stride = conv.stride == (stride,) * spatial_dims
    if has_size and has_stride:
        return conv
    new: Any = CONVS[spatial_dims](
        conv.in_channels, conv.out_channels, size, stride=stride, padding=size // 2, bias=False
    )
    nn.init.kaiming_normal_(new.weight)
    return new
