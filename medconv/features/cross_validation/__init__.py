"""Scores of the folds of a cross-validation, for sweeps and for the search for post-processing."""
