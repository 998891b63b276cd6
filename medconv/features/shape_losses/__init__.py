"""Losses of the shape of structures: boundary, clDice and skeleton recall, for thin or small ones."""
