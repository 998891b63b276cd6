"""HTML report of an evaluation of objects: scores, their distributions, and the worst cases with images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medconv.features.instances.matching import DEFINITIONS, THRESHOLDS
from medconv.features.instances.targets import WORDS
from medconv.features.report import rendering
from medconv.features.report.distributions import Series, distribution
from medconv.features.report.overlays import case_picture

_WORST_CASES = 6


def write_report(
    result: Mapping[str, Any], files: Mapping[str, tuple[Path, ...]], images: Mapping[str, Path]
) -> str:
    """The HTML page. Args: as those of `InstanceEvaluation`."""
    sets = {"a": result["cases"]} | ({"b": result["compare"]["cases"]} if "compare" in result else {})
    series = []
    for name, words in WORDS.items():
        for style, rows in sets.items():
            values = {row["case"]: row[name] for row in rows if row[name] is not None}
            series.append(Series(f"{words} {style.upper()}" if len(sets) > 1 else words, values, style))
    scored = [row for row in result["cases"] if row["ap"] is not None]
    worst = sorted(scored, key=lambda row: (row["ap"], row["case"]))[:_WORST_CASES]
    return rendering.render(
        "instances_report.html.j2",
        result=result,
        words=WORDS,
        precisions=list(zip(THRESHOLDS, result["mean"]["ap_per_threshold"], strict=False)),
        chart=distribution(series, ""),
        worst=[_case_card(row, files[row["case"]], images.get(row["case"])) for row in worst],
        definitions=DEFINITIONS,
    )


def _case_card(row: Mapping[str, Any], paths: tuple[Path, ...], image: Path | None) -> dict[str, Any]:
    """A case for the template: its picture, with a colour for each object."""
    columns = ["reference", "prediction", "compare"][: len(paths)]
    png, caption = case_picture(paths, image, columns)
    return {"row": row, "png": png, "caption": caption}
