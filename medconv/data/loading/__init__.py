"""Datasets, data loaders and worker processes that serve patches and images."""
