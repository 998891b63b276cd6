"""Losses for label maps and for image-level targets."""
