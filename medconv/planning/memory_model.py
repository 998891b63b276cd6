"""Memory model of a training step of our U-Net, and the memory budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from medconv.planning.topology import Network, num_weights
from medconv.utils.errors import ArgumentError

GB = 2**30
_WEIGHT_BYTES = 16  # fp32 weights, gradients, and AdamW's two moments
# Per voxel and class: the softmax, its gradient and a temporary in fp32; beside them the logits in half
# precision, if they are.
_LOSS_BYTES = 12
# Of the activations at their peak, as measured (docs/planning.md).
_KEPT_SHARE = {"none": 1.0, "pointwise": 0.75, "blocks": 0.7}


@dataclass(frozen=True)
class Budget:
    """What a training step may cost: the memory of one device, and a size for the time there is.

    Args:
        memory_gb: GiB.
        origin: where `memory_gb` comes from, in words.
        precision: Lightning's.
        activation_checkpointing: none, blocks or pointwise.
        size: of `sizes.SIZES`.
        size_origin: why this size, in words.
    """

    memory_gb: float = 8.0
    origin: str = "memory_gb"
    precision: str = "32-true"
    activation_checkpointing: str = "none"
    size: str = "full"
    size_origin: str = "no limit of time"

    def __post_init__(self) -> None:
        if not 0 < self.memory_gb < float("inf"):
            raise ArgumentError("memory_gb", f" must be a positive number of GB, got {self.memory_gb}")


def step_bytes(
    network: Network,
    patch: Sequence[int],
    batch_size: int,
    num_channels: int,
    num_classes: int,
    budget: Budget,
) -> float:
    """Peak memory of a step: weights, optimizer state, and activations at the start of the backward pass.

    A convolution with norm and activation keeps two tensors: an encoder stage that for each of its own, and
    its downsampled input, a decoder stage for each and the concatenation. Then the loss and the first
    gradients, without the workspace of the convolutions. Error against measured steps: docs/planning.md.
    """
    value_bytes = _value_bytes(budget.precision)
    channels = network.channels
    num_stages = len(channels)
    stage_convs = network.encoder_convs or (2,) * num_stages
    decoder_tensors = 2 + 2 * network.decoder_convs
    stage_voxels = float(prod(patch))
    values = 0.0
    for stage in range(num_stages):
        if stage > 0:
            stage_voxels /= prod(network.strides[stage - 1])
        input_channels = num_channels if stage == 0 else channels[stage]
        num_tensors = 2 * stage_convs[stage]
        if stage < num_stages - 1:  # the coarsest stage has no decoder
            num_tensors += decoder_tensors
        values += stage_voxels * (channels[stage] * num_tensors + input_channels)
    half_copy_bytes = value_bytes if value_bytes < 4 else 0
    # at the finest stage: the first gradients, or the loss, whichever takes more
    loss_bytes = (_LOSS_BYTES + half_copy_bytes) * num_classes
    end_bytes = prod(patch) * max(2 * channels[0] * value_bytes, loss_bytes)
    weight_bytes = num_weights(network, num_channels, num_classes) * (_WEIGHT_BYTES + half_copy_bytes)
    kept_share = _KEPT_SHARE.get(budget.activation_checkpointing, 1.0)
    return weight_bytes + batch_size * (values * value_bytes + end_bytes) * kept_share


def _value_bytes(precision: str) -> int:
    """Of an activation."""
    if "16" in precision:
        return 2
    return 8 if "64" in precision else 4
