"""What is examined of a case of whole images with values."""

import numpy as np

from medconv.data.case import Case, Dataset
from medconv.data.preprocessing.examine import CaseReport, note_content, samples_per_case
from medconv.data.preprocessing.value_bands import sampled
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
    note_content(image, report, is_cropped=False)
    if case.split != "test":  # nothing may be learned from test cases
        report.intensities = sampled(image, samples_per_case(dataset))
