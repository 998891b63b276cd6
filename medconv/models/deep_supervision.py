"""Deep supervision: heads on the coarser stages of our U-Net's decoder, used only in training."""

from typing import Any

from torch import Tensor, nn

from medconv.convs.parametrization import EquivariantPrior
from medconv.models.unet import CONVS
from medconv.utils.errors import ArgumentError


class DeepSupervision(nn.Module):
    """Runs a network and adds the logits of its coarser stages; the network itself has no such heads.

    So validation, export and benchmarks use the network without heads. Every stage of the decoder has one
    except the coarsest; with fewer than four stages there are none. For a network that commutes
    with flips, as with `conv=mirror`, so do the heads.

    Shape:
        (network, image (batch, channels, *spatial)) -> list of (batch, outputs, *spatial of the stage),
        finest first.
    Args:
        network: whose stages get heads.
        num_outputs: channels of each head.
    Raises:
        ArgumentError: the network has no such stages.
    Source: Lee et al. 2015, arXiv:1409.5185; which stages, as in Isensee et al. 2021,
        doi:10.1038/s41592-020-01008-z.
    """

    def __init__(self, network: Any, num_outputs: int) -> None:
        super().__init__()
        if not getattr(network, "supports_deep_supervision", False):
            network_class = f"{type(network).__module__}.{type(network).__name__}"
            raise ArgumentError(
                "deep_supervision",
                f"=true needs our own U-Net (customconv or resenc), got {network_class}; dynunet, mednext, "
                "unetplusplus (deep_supervision=true) and segresnet_ds (dsdepth=3) have heads of their own",
            )
        head = CONVS[len(network.divisor)]
        # The network has the head of the finest stage. The decoder begins one stage above the coarsest, and
        # its first stage gets no head.
        self.heads = nn.ModuleList(head(channels, num_outputs, 1) for channels in network.channels[1:-2])
        priors = [layer for layer in network.modules() if isinstance(layer, EquivariantPrior)]
        for layer in self.heads:
            nn.init.kaiming_normal_(layer.weight, a=0.01)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
            if priors:
                priors[0].make_head(layer)

    def forward(self, network: nn.Module, image: Tensor) -> list[Tensor]:
        if not self.heads:
            return [network(image)]
        logits, *stages = network(image, stages=len(self.heads))
        outputs = [logits]
        for head, stage in zip(self.heads, stages, strict=True):
            outputs.append(head(stage))
        return outputs
