"""The page of an evaluation of whole images: scores, pictures of them all, and the worst cases with their
images.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medconv.data.io.images import read_image
from medconv.data.preprocessing.preprocess import to_canonical
from medconv.evaluation import rendering
from medconv.evaluation.image_level import arrays, words
from medconv.inference.output_table import SALIENCY
from medconv.metrics import plots
from medconv.targets.image_level import ImageLevelTargets
from medconv.utils import visualization

_WORST = 12  # cases shown
_SHOWN = 4  # of a case's outputs
_BYTES = 4_000_000  # of a picture that another command wrote; none of ours is as large
_DEFINITIONS = {
    "AUC": "the share of pairs of a case with and a case without in which the former has the higher "
    "probability; a tie "
    "counts half. Of two classes that of the second; of more, and of findings, the mean of each against "
    "the rest.",
    "Balanced accuracy": "the mean sensitivity of the classes; of a finding of its presence and its absence.",
    "F1": "twice the common cases over the sum of those called and those there; the mean over classes or "
    "findings.",
    "Calibration error": "how far probabilities are from the share of cases in which they came true, in 15 "
    "bins of equal width, the mean over cases; of classes by the highest probability of each case.",
    "Interval": "95 % bootstrap interval over cases, 1,000 samples, always the same ones.",
    "Error": "of a case: the probability that was not given to the truth, of findings the largest such; of "
    "numbers the "
    "absolute error in standard deviations of the truth, the mean over names.",
}


def write_report(result: Mapping[str, Any], images: Mapping[str, Path]) -> str:
    """The page. Args: result: as `whole.evaluate` returns it. images: case to image, of those that have
    one.
    """
    image_targets, outputs, values = arrays(result)
    drawn = plots.pictures(image_targets, outputs, values)
    saliency = Path(result["predictions"]).parent / SALIENCY
    worst = sorted(result["cases"], key=lambda row: (-row["error"], row["case"]))[:_WORST]
    return rendering.render(
        "whole_report.html.j2",
        result=result,
        image_targets=image_targets,
        charts={name: visualization.png(pixels) for name, pixels in drawn.items()},
        columns=[words(name) for name in next(iter(result["per_class"].values()))],
        worst=[
            _case(row, image_targets, images.get(row["case"]), saliency / f"{row['case']}.png")
            for row in worst
        ],
        definitions=_DEFINITIONS,
        words=words,
    )


def _case(
    row: Mapping[str, Any], image_targets: ImageLevelTargets, image: Path | None, saliency: Path
) -> dict[str, Any]:
    """What the template shows of a case: its picture, and the outputs that are highest or farthest from
    the truth.
    """
    png, caption = _picture(image, saliency)
    case = {"name": row["case"], "error": row["error"], "png": png, "caption": caption, "truth": None}
    if image_targets.kind == "multiclass":
        outputs = sorted(zip(image_targets.names, row["outputs"], strict=True), key=lambda item: -item[1])
        return case | {"truth": row["truth"][0], "outputs": outputs[:_SHOWN]}
    triples = sorted(
        zip(image_targets.names, row["truth"], row["outputs"], strict=True), key=lambda item: -item[2]
    )
    return case | {"outputs": sorted(triples, key=lambda item: -abs(item[2] - item[1]))[:_SHOWN]}


def _picture(image: Path | None, saliency: Path) -> tuple[bytes, str]:
    """What `predict --saliency` drew, else the image, as PNG, with its caption; or why there is none."""
    try:
        content = saliency.read_bytes() if saliency.stat().st_size < _BYTES else b""
    except (OSError, ValueError):  # the latter: no possible name
        content = b""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return content, "image, and where the answer comes from (Grad-CAM)"
    if image is None:
        return b"", ""
    try:
        array, grid = read_image([image])
    except (ValueError, OSError) as error:
        return b"", f"without the image: {error}"
    turned, spacing = to_canonical(array, grid)
    flat = turned[..., 0] if grid.shape[2] == 1 else turned
    return visualization.png(visualization.heat(flat, None, spacing[: flat.ndim - 1])), ""
