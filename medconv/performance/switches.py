"""Settings for speed and memory that change neither what a network computes nor its parameter names."""

import logging

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medconv.convs.parametrization import CHANNELS_LAST
from medconv.models.layers.depthwise import swap_depthwise
from medconv.models.layers.fast_norm import swap_norms
from medconv.performance.checkpointing import apply_checkpointing
from medconv.performance.sound_kernels import use_sound_kernels
from medconv.utils.errors import Argument, ArgumentError
from medconv.utils.hardware import compiler_missing

log = logging.getLogger(__name__)
_CONVS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def apply_switches(
    network: nn.Module,
    *,
    channels_last: bool,
    fast_norm: bool = False,
    fast_depthwise: bool = False,
    activation_checkpointing: str = "none",
    compile: bool = False,
    cuda_graphs: bool = False,
    shapes_grow: bool = False,
    sync_batchnorm: bool = False,
) -> nn.Module:
    """Apply the settings to a network, in place, and `use_sound_kernels` to this process.

    Args:
        channels_last: weights in `torch.channels_last` or `channels_last_3d`; inputs: see `memory_format`.
        fast_norm: instance and batch norms for channels-last, fused with the activation after them.
        fast_depthwise: depthwise 3-D convolutions in bf16 on a CPU as grouped blocks.
        activation_checkpointing: `none`, `blocks` or `pointwise`; see `apply_checkpointing`.
        compile: `torch.compile` in place, so that parameter names stay.
        cuda_graphs: with `compile`, replay the step's kernels as one CUDA graph; shapes must not change.
        shapes_grow: images get larger while the network trains, so `compile` makes code for any size when it
            meets the second one; else it makes faster code for each of the few shapes.
        sync_batchnorm: the trainer replaces batch norms by `nn.SyncBatchNorm`, so they are left as they are.
    Returns:
        The network.
    Raises:
        ValueError: `compile` without a compiler, `cuda_graphs` without it.
    """
    if cuda_graphs and not compile:
        raise ArgumentError(
            "cuda_graphs", "=true needs ", Argument("compile"), "=true: the compiler records the graphs"
        )
    use_sound_kernels()
    # Layers are exchanged before blocks are checkpointed, and the compiler sees the result of all.
    if fast_norm:
        swap_norms(network, keep_batch_norms=sync_batchnorm)
        if sync_batchnorm and any(isinstance(layer, _BatchNorm) for layer in network.modules()):
            log.info("fast_norm: batch norms stay as they are, sync_batchnorm replaces them")
    if fast_depthwise:
        swap_depthwise(network)
    if channels_last:
        # Each convolution by itself: one network may hold 2D and 3D weights
        for layer in network.modules():
            # 1x1 kernels are in both layouts already, and DDP's buckets expect their strides
            if isinstance(layer, _CONVS) and max(layer.kernel_size) > 1:
                layer.to(memory_format=CHANNELS_LAST[2 + len(layer.kernel_size)])  # type: ignore[call-overload]
    if activation_checkpointing != "none":
        num_blocks = apply_checkpointing(network, activation_checkpointing)
        if activation_checkpointing == "blocks":
            log.info("checkpointing %d blocks", num_blocks)
    if compile:
        missing = compiler_missing()
        if missing is not None:
            raise ArgumentError("compile", f"=true: {missing}")
        uses_graphs = cuda_graphs and torch.cuda.is_available()
        network.compile(
            mode="reduce-overhead" if uses_graphs else None, dynamic=None if shapes_grow else False
        )
    return network


def memory_format(channels_last: bool, spatial_dims: int) -> torch.memory_format:
    """The memory format of image batches (batch, channels, *spatial) for a network with this setting."""
    return CHANNELS_LAST[2 + spatial_dims] if channels_last else torch.contiguous_format


def to_memory_format(image: Tensor, layout: torch.memory_format) -> Tensor:
    """The image with the strides of a memory format, also if it has one channel.

    An image of one channel is contiguous in both formats, so `Tensor.contiguous` leaves its strides, and a
    GPU's convolutions, whose format follows from the strides, would not run in channels-last.
    """
    return image.to(memory_format=layout)
