"""Checkpoints written and resumed, bit for bit."""
