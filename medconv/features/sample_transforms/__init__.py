"""`augmentation=monai`: a user's own transforms of MONAI or TorchIO, applied to each sample."""
