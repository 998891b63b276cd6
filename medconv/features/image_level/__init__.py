"""Targets of whole images: classification, regression, ordered grades, several labels."""
