"""Shards the weights of convolutions over a device mesh; from Python alone."""
