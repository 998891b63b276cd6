"""Building blocks that networks share: norms, activations, pooling, N-d lookups."""

from medconv.models.layers.batchnorm_stats import RunningStatistics, fix_statistics
from medconv.models.layers.blocks import ConvBlock, conv_nd, conv_transpose_nd, norm_nd
from medconv.models.layers.depthwise import swap_depthwise
from medconv.models.layers.instance_norm import swap_norms
from medconv.models.layers.max_pool import swap_pools

__all__ = [
    "ConvBlock",
    "RunningStatistics",
    "conv_nd",
    "conv_transpose_nd",
    "fix_statistics",
    "norm_nd",
    "swap_depthwise",
    "swap_norms",
    "swap_pools",
]
