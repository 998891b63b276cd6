"""Callbacks beside the training loop, one per file."""
