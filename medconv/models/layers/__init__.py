"""Building blocks that networks share: norms, activations, pooling, N-d lookups."""
