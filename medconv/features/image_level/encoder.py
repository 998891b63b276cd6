"""`model=encoder`: the encoder of our U-Net, with a head for outputs per image."""

from hydra.utils import get_object
from torch import Tensor

from medconv.config import Node
from medconv.models.unet import CONVS, Stages, UNet


def as_encoder(model: Node) -> Node:
    """The `model` node of a config in which our U-Net is replaced by `Encoder`, which has the same arguments.

    A subclass of our U-Net stays as it is: its author knows what it returns.
    """
    try:
        network_class = get_object(str(model.get("_target_")))
    except Exception:  # importing a user's module may raise anything; `build` reports it
        return model
    return {**model, "_target_": f"{__name__}.Encoder"} if network_class is UNet else model


class Encoder(Stages):
    """The encoder of our U-Net, global average pooling, and a linear layer.

    The linear layer is a 1x1 convolution, which `conv=mirror` can make invariant to flips.

    Shape:
        (batch, in_channels, *spatial) -> (batch, out_channels), logits.
    Args:
        as of `UNet`.
    Raises:
        ValueError: as of `Stages`.
    """

    def add_outputs(self, out_channels: int) -> None:
        self.head = CONVS[len(self.divisor)](self.channels[-1], out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        # kept as an image of one voxel, which a convolution takes
        coarsest = self.features(x)[-1]
        spatial_axes = list(range(2, x.ndim))
        pooled = coarsest.mean(spatial_axes, keepdim=True)
        logits: Tensor = self.head(pooled)
        return logits.flatten(1)
