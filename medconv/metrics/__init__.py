"""Metrics and plots from arrays alone: Dice, surface distances, AUC, confidence intervals."""
