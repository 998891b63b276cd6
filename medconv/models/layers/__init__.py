"""Building blocks that networks share: norms, depthwise convolutions, pooling."""
