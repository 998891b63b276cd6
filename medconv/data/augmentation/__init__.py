"""Training augmentations: parameters are drawn apart from where they are applied."""
