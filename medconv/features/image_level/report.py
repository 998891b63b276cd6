"""HTML report of an image-level evaluation: scores, plots, and the worst cases with their images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.io.grids import to_canonical
from medconv.data.io.images import read_image
from medconv.features.image_level.metrics import words
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.features.pictures import drawing
from medconv.features.report import rendering

_WORST_CASES = 12
_MAX_OUTPUTS = 4  # of a case
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
    "Error": "for a case, 1 minus the probability of the truth; for multilabel the largest over labels; for "
    "regression the absolute error in standard deviations of the truth, the mean over names.",
}


def write_report(
    result: Mapping[str, Any],
    targets: ImageLevelTargets,
    outputs: np.ndarray,
    values: np.ndarray,
    images: Mapping[str, Path],
) -> str:
    """The HTML page. Args: as those of `ImageLevelEvaluation`."""
    charts = targets.pictures(outputs, values)
    first_row = next(iter(result["per_class"].values()))
    # `predict --saliency` writes its pictures beside the table
    saliency_folder = Path(result["predictions"]).parent / "saliency"
    worst = sorted(result["cases"], key=lambda row: (-row["error"], row["case"]))
    cards = []
    for row in worst[:_WORST_CASES]:
        saliency = saliency_folder / f"{row['case']}.png"
        cards.append(_case_card(row, targets, images.get(row["case"]), saliency))
    return rendering.render(
        "report.html.j2",
        package="medconv.features.image_level",
        result=result,
        targets=targets,
        charts={name: drawing.png(pixels) for name, pixels in charts.items()},
        columns=[words(name) for name in first_row],
        worst=cards,
        definitions=_DEFINITIONS,
        words=words,
    )


def _case_card(
    row: Mapping[str, Any], targets: ImageLevelTargets, image: Path | None, saliency: Path
) -> dict[str, Any]:
    """A case for the template: its picture, and its highest outputs, or those farthest from the truth."""
    png, caption = _picture(image, saliency)
    card = {"name": row["case"], "error": row["error"], "png": png, "caption": caption, "truth": None}
    if targets.num_values < len(targets.names):  # one class of several
        named_outputs = zip(targets.names, row["outputs"], strict=True)
        outputs = sorted(named_outputs, key=lambda item: -item[1])
        return card | {"truth": row["truth"][0], "outputs": outputs[:_MAX_OUTPUTS]}
    all_rows = zip(targets.names, row["truth"], row["outputs"], strict=True)
    rows = [known for known in all_rows if known[1] is not None]
    # sorting is stable: of outputs equally far from the truth, the highest comes first
    highest_first = sorted(rows, key=lambda item: -item[2])
    farthest_first = sorted(highest_first, key=lambda item: -abs(item[2] - item[1]))
    return card | {"outputs": farthest_first[:_MAX_OUTPUTS]}


def _picture(image: Path | None, saliency: Path) -> tuple[bytes, str]:
    """The picture of `predict --saliency`, else the image, as PNG, with its caption; or why there is none."""
    content = _small_file(saliency)
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return content, "image, and saliency map (Grad-CAM)"
    if image is None:
        return b"", ""
    try:
        voxels, grid = read_image([image])
    except (ValueError, OSError) as error:
        return b"", f"without the image: {error}"
    canonical, spacing = to_canonical(voxels, grid)
    is_slice = grid.shape[2] == 1
    pixels = canonical[..., 0] if is_slice else canonical
    spatial_axes = pixels.ndim - 1  # the first one holds channels
    picture = drawing.heat(pixels, None, spacing[:spatial_axes])
    return drawing.png(picture), ""


def _small_file(path: Path) -> bytes:
    """The content; empty if there is no such file, or it is too large."""
    try:
        if path.stat().st_size >= _MAX_BYTES:
            return b""
        return path.read_bytes()
    except (OSError, ValueError):  # the latter: not a possible file name
        return b""
