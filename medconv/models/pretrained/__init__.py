"""Pretrained weights: read a file, match names, adapt sizes, load, freeze."""
