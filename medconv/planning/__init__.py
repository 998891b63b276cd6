"""From a dataset's fingerprint and a memory budget to spacing, patch, batch and network topology."""
