"""Building blocks that networks share: norms, activations, N-d lookups."""

from medconv.layers.blocks import ConvBlock, conv_nd, conv_transpose_nd, norm_nd

__all__ = ["ConvBlock", "conv_nd", "conv_transpose_nd", "norm_nd"]
