"""Evaluation: scores and reports of predictions, cross-validation, and the choice of post-processing."""
