"""Cases on their way from files to batches: reading, datasets, preprocessing, augmentation, loading."""

from medconv.data.case import Case, Dataset, Grid

__all__ = ["Case", "Dataset", "Grid"]
