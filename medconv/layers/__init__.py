"""Building blocks that networks share: norms, activations, N-d lookups."""

from medconv.layers.blocks import ConvBlock, conv_nd, conv_transpose_nd, norm_nd
from medconv.layers.depthwise import swap_depthwise
from medconv.layers.norm import instance_norm, swap_norms
from medconv.layers.pooling import swap_pools
from medconv.layers.running import RunningStatistics, fix_statistics

__all__ = [
    "ConvBlock",
    "RunningStatistics",
    "conv_nd",
    "conv_transpose_nd",
    "fix_statistics",
    "instance_norm",
    "norm_nd",
    "swap_depthwise",
    "swap_norms",
    "swap_pools",
]
