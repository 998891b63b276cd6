"""Losses for label maps, and what any loss must fit."""
