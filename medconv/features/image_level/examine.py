"""What is examined of a case of whole images with values."""

import numpy as np

from medconv.data.case import Case, Dataset
from medconv.data.io.grids import to_canonical
from medconv.data.preprocessing.examine import CaseReport, content_hash, sampled, samples_per_case
from medconv.features.image_level.targets import ImageLevelTargets


def examine_image(case: Case, image: np.ndarray | None, dataset: Dataset, report: CaseReport) -> None:
    """As `Family.examine`."""
    assert isinstance(dataset.targets, ImageLevelTargets)
    invalid = dataset.targets.invalid_reason
    error_text = "has no values" if case.values is None else invalid(case.values)
    if error_text:
        report.errors.append(error_text)
    if image is None:
        return
    assert report.grid is not None
    canonical, report.spacing_mm = to_canonical(image, report.grid)
    report.flat = report.grid.shape[2] == 1
    report.shape = canonical.shape[1:]
    report.content = content_hash(canonical, report)
    if case.split != "test":  # nothing may be learned from test cases
        report.intensities = sampled(image, samples_per_case(dataset))
