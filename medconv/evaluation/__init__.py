"""Scores of folders of predictions, reports, cross-validation."""
