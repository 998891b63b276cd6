"""Checks and fingerprint of a dataset, resampling and normalisation, and the store of prepared cases."""
