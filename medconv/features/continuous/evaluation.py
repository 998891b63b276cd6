"""Predicted images against references: PSNR, SSIM and absolute error of every case, and the report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from medconv.data.case import Grid
from medconv.data.datasets.patterns import home
from medconv.data.io.grids import on_grid
from medconv.data.io.images import read_image
from medconv.evaluation.labels import case_files, images_of, train_cases
from medconv.evaluation.results import Evaluation, plain_number
from medconv.features.continuous.metrics import METRICS, Row, means, measure
from medconv.features.continuous.views import in_planes
from medconv.inference.output import read_manifest
from medconv.metrics import statistics
from medconv.metrics.visualization import png
from medconv.utils.logging import some
from medconv.utils.progress import each

_WORST_CASES = 12
_DEFINITIONS = {
    "PSNR": "peak signal-to-noise ratio, 20 log10(range / root mean square error), in dB; the range is that "
    "of the reference of the case, from lowest to highest value.",
    "SSIM": "structural similarity, the mean over windows of 11 voxels along each axis with Gaussian weights "
    "(sigma 1.5), in 3D for volumes; the same range.",
    "Mean absolute error": "over all voxels, in the units of the reference.",
}


@dataclass(frozen=True)
class ImageEvaluation:
    """The result of `evaluate`.

    Args:
        result: the content of the JSON file: `mean` (metric to value), `cases` (a row each), `targets`,
            `train_cases`, `without_prediction`; with `compare` also `compare` and `comparison` (metric to
            what `statistics.paired` returns).
        files: case to its reference and prediction.
        images: case to the image that it was predicted from, for cases that have one.
    """

    counted: ClassVar[str] = "references"
    result: dict[str, Any]
    files: Mapping[str, tuple[Path, Path]]
    images: Mapping[str, Path]

    def csv_rows(self) -> Iterator[Sequence[Any]]:
        yield ["case", *METRICS]
        for row in self.result["cases"]:
            yield [row["case"], *(row[name] for name in METRICS)]

    def score_lines(self) -> list[str]:
        lines = [f"{len(self.result['cases'])} cases"]
        for name, words in METRICS.items():
            lines.append(f"{words:<20}{plain_number(self.result['mean'][name]):>10}")
        return lines

    def comparison_lines(self) -> list[str]:
        lines = []
        for name, row in self.result["comparison"].items():
            cells = ", ".join(f"{key} {plain_number(row[key])}" for key in ("difference", "low", "high", "p"))
            lines.append(f"{METRICS[name]}, predictions minus compare: {cells}")
        return lines


def evaluate(
    predictions: Path,
    references: Path,
    compare: Path | None = None,
    workers: int = 1,
    images: Path | None = None,
) -> ImageEvaluation:
    """Measure every predicted image against the reference of the same case id.

    Args:
        predictions, references, compare: folders of images, or patterns with `{id}`.
        workers: cases measured at once.
        images: their folder, for the report; None: those that the predictions were made from.
    Raises:
        ValueError: predictions without a reference, or files that cannot be measured.
    """
    reference_files = case_files(references, "references")
    rows_of_sets = {}
    files: dict[str, tuple[Path, Path]] = {}
    for path in filter(None, (predictions, compare)):
        predicted = case_files(path, "predictions" if path is predictions else "compare")
        missing = sorted(set(predicted) - set(reference_files))
        if missing:
            raise ValueError(f"references {references}: no image there for {some(missing, 20)}")
        pairs = {case: (reference_files[case], file) for case, file in predicted.items()}
        files = files or pairs
        rows = each(partial(_row, pairs), list(pairs), workers, "evaluating")
        rows_of_sets[path] = dict(zip(pairs, rows, strict=True))
    result = {
        **_summary(predictions, rows_of_sets[predictions]),
        "references": str(references),
        "targets": read_manifest(home(predictions)).get("targets"),
        "without_prediction": sorted(set(reference_files) - set(files)),
    }
    if compare is not None:
        result["compare"] = _summary(compare, rows_of_sets[compare])
        others = rows_of_sets[compare]
        shared = [(row, others[case]) for case, row in rows_of_sets[predictions].items() if case in others]
        result["comparison"] = {
            name: statistics.paired(
                [first[name] for first, _ in shared], [second[name] for _, second in shared]
            )
            for name in METRICS
        }
    image_files = images_of(home(predictions), home(references), images, list(files))
    return ImageEvaluation(result, files, image_files)


def _row(pairs: Mapping[str, tuple[Path, Path]], case: str) -> Row:
    _, reference, prediction = _read(*pairs[case])
    return measure(prediction, reference)


def _read(reference_file: Path, file: Path) -> tuple[Grid, np.ndarray, np.ndarray]:
    """The grid, the reference and an image there. Raises: ValueError: other than one channel, or grid."""
    reference, grid = read_image([reference_file])
    image, image_grid = read_image([file])
    for path, channels in ((reference_file, reference), (file, image)):
        if len(channels) != 1:
            raise ValueError(f"{path}: expected an image of one channel, found {len(channels)}")
    return grid, reference[0], on_grid(image[0], reference_file, grid, file, image_grid)


def _summary(path: Path, rows: Mapping[str, Row]) -> dict[str, Any]:
    return {
        "predictions": str(path),
        "mean": means(rows),
        "per_class": {},
        "cases": [{"case": case, **row} for case, row in rows.items()],
        "train_cases": train_cases(home(path), list(rows)),
    }


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
    grid, reference, prediction = _read(*evaluation.files[case])
    images = {"prediction": prediction, "reference": reference, "error": np.abs(prediction - reference)}
    if case in evaluation.images:
        source, source_grid = read_image([evaluation.images[case]])
        if source_grid.shape == grid.shape:
            images = {"image": source[0], **images}
    return png(in_planes(images, grid))
