"""HTML report of an image-level evaluation: scores, plots, and the worst cases with their images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.io.images import read_image
from medconv.data.preprocessing.orientation import to_canonical
from medconv.evaluation import rendering
from medconv.inference.output_table import SALIENCY
from medconv.metrics import visualization
from medconv.targets.image_level import ImageLevelTargets

_WORST_CASES = 12
_SHOWN_OUTPUTS = 4  # of a case
_MAX_BYTES = 4_000_000  # of a saliency picture; a larger file was not written by medconv
_DEFINITIONS = {
    "AUC": "area under the ROC curve: the share of pairs of a positive and a negative case in which the "
    "positive one has the higher probability; a tie counts half. With two classes, that of the second; with "
    "more, and for multilabel, the mean over classes, each against the rest.",
    "Balanced accuracy": "the mean sensitivity over classes; for a label of multilabel, the mean of "
    "sensitivity and specificity.",
    "F1": "harmonic mean of precision and recall; the mean over classes or labels.",
    "Calibration error": "expected calibration error: the difference between probability and observed "
    "frequency, in 15 bins of equal width, averaged over cases; for multiclass, of the highest probability "
    "of each case.",
    "Interval": "95 % bootstrap interval over cases, 1,000 samples with a fixed seed.",
    "Error": "of a case: 1 minus the probability of the truth, for multilabel the largest over labels; for "
    "regression the absolute error in standard deviations of the truth, the mean over names.",
}


def words(name: str) -> str:
    """The display name of a metric."""
    return {"auc": "AUC", "f1": "F1", "mae": "mean absolute error", "rmse": "RMSE", "r2": "R2"}.get(
        name, name.replace("_", " ")
    )


def write_report(
    result: Mapping[str, Any],
    targets: ImageLevelTargets,
    outputs: np.ndarray,
    values: np.ndarray,
    images: Mapping[str, Path],
) -> str:
    """The HTML page. Args: as those of `ImageLevelEvaluation`."""
    charts = targets.pictures(outputs, values)
    saliency = Path(result["predictions"]).parent / SALIENCY
    worst = sorted(result["cases"], key=lambda row: (-row["error"], row["case"]))[:_WORST_CASES]
    return rendering.render(
        "image_level_report.html.j2",
        result=result,
        targets=targets,
        charts={name: visualization.png(pixels) for name, pixels in charts.items()},
        columns=[words(name) for name in next(iter(result["per_class"].values()))],
        worst=[
            _case(row, targets, images.get(row["case"]), saliency / f"{row['case']}.png") for row in worst
        ],
        definitions=_DEFINITIONS,
        words=words,
    )


def _case(
    row: Mapping[str, Any], targets: ImageLevelTargets, image: Path | None, saliency: Path
) -> dict[str, Any]:
    """A case for the template: its picture, and its highest outputs, or those farthest from the truth."""
    png, caption = _picture(image, saliency)
    case = {"name": row["case"], "error": row["error"], "png": png, "caption": caption, "truth": None}
    if targets.num_values < len(targets.names):  # one class of several
        outputs = sorted(zip(targets.names, row["outputs"], strict=True), key=lambda item: -item[1])
        return case | {"truth": row["truth"][0], "outputs": outputs[:_SHOWN_OUTPUTS]}
    triples = sorted(zip(targets.names, row["truth"], row["outputs"], strict=True), key=lambda item: -item[2])
    return case | {"outputs": sorted(triples, key=lambda item: -abs(item[2] - item[1]))[:_SHOWN_OUTPUTS]}


def _picture(image: Path | None, saliency: Path) -> tuple[bytes, str]:
    """The picture of `predict --saliency`, else the image, as PNG, with its caption; or why there is none."""
    try:
        content = saliency.read_bytes() if saliency.stat().st_size < _MAX_BYTES else b""
    except (OSError, ValueError):  # the latter: not a possible file name
        content = b""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return content, "image, and saliency map (Grad-CAM)"
    if image is None:
        return b"", ""
    try:
        array, grid = read_image([image])
    except (ValueError, OSError) as error:
        return b"", f"without the image: {error}"
    canonical, spacing = to_canonical(array, grid)
    flat = canonical[..., 0] if grid.shape[2] == 1 else canonical
    return visualization.png(visualization.heat(flat, None, spacing[: flat.ndim - 1])), ""
