"""Predicted images against references: PSNR, SSIM and absolute error of every case, and the report."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from medconv.data.case import Grid
from medconv.data.io.images import read_image
from medconv.evaluation.results import Evaluation
from medconv.evaluation.scored_cases import ScoredCases
from medconv.features.continuous.labels import one_channel
from medconv.features.continuous.metrics import METRICS, Row, means, measure

_WORST_CASES = 12
_DEFINITIONS = {
    "PSNR": "peak signal-to-noise ratio, 20 log10(range / root mean square error), in dB; the range is that "
    "of the reference of the case, from lowest to highest value.",
    "SSIM": "structural similarity, the mean over windows of 11 voxels along each axis with Gaussian weights "
    "(sigma 1.5), in 3D for volumes; the same range.",
    "Mean absolute error": "over all voxels, in the units of the reference.",
}


class ImageEvaluation(ScoredCases):
    """The scores of predicted images."""

    words = METRICS

    @staticmethod
    def read(path: Path, like: Path | None = None) -> tuple[np.ndarray, Grid]:
        return one_channel(path)

    @staticmethod
    def measure(prediction: np.ndarray, reference: np.ndarray) -> Row:
        return measure(prediction, reference)

    @staticmethod
    def means(rows: Sequence[Row]) -> Row:
        return means(rows)


evaluate = ImageEvaluation.of_folders


def page(evaluation: Evaluation) -> str | None:
    """The HTML page of an evaluation of images; without the feature `report` there is none."""
    if not isinstance(evaluation, ImageEvaluation) or find_spec("medconv.features.report") is None:
        return None
    from medconv.features.report import rendering

    rows = evaluation.result["cases"]
    worst_first = sorted(rows, key=lambda row: (row["psnr"] is not None, row["psnr"] or 0, row["case"]))
    pictures = {row["case"]: _picture(evaluation, row["case"]) for row in worst_first[:_WORST_CASES]}
    return rendering.render(
        "images_report.html.j2",
        "medconv.features.continuous",
        result=evaluation.result,
        rows=worst_first,
        pictures=pictures,
        metrics=METRICS,
        definitions=_DEFINITIONS,
    )


def _picture(evaluation: ImageEvaluation, case: str) -> bytes:
    """The image where there is one, prediction, reference and error, as PNG."""
    from medconv.features.continuous.views import in_planes
    from medconv.features.pictures.drawing import png

    reference_file, prediction_file, *_ = evaluation.files[case]
    prediction, reference, grid, _ = evaluation.pair(prediction_file, reference_file)
    images = {"prediction": prediction, "reference": reference, "error": np.abs(prediction - reference)}
    if case in evaluation.images:
        source, source_grid = read_image([evaluation.images[case]])
        if source_grid.shape == grid.shape:
            images = {"image": source[0], **images}
    return png(in_planes(images, grid))
