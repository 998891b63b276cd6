"""From a checkpoint to predictions: loading, sliding window, test-time augmentation, output folders."""
