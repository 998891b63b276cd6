"""The page of an evaluation of whole images: scores, pictures of them all, and the worst cases with their images.

Case ids, names and paths come from files; each is escaped where it enters the page.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import medconv
from medconv import outcome_pictures, pictures
from medconv.data.files import read_image
from medconv.data.preprocess import to_canonical
from medconv.evaluation.report import page, table
from medconv.evaluation.whole import arrays, words
from medconv.outcomes import Outcome
from medconv.predicting.answers import SALIENCY

_WORST = 12  # cases shown
_SHOWN = 4  # of a case's outputs
_BYTES = 4_000_000  # of a picture that another command wrote; none of ours is as large
_DEFINITIONS = {
    "AUC": "the share of pairs of a case with and a case without in which the former has the higher probability; a tie "
    "counts half. Of two classes that of the second; of more, and of findings, the mean of each against the rest.",
    "Balanced accuracy": "the mean sensitivity of the classes; of a finding of its presence and its absence.",
    "F1": "twice the common cases over the sum of those called and those there; the mean over classes or findings.",
    "Calibration error": "how far probabilities are from the share of cases in which they came true, in 15 bins of equal "
    "width, the mean over cases; of classes by the highest probability of each case.",
    "Interval": "95 % bootstrap interval over cases, 1,000 samples, always the same ones.",
    "Error": "of a case: the probability that was not given to the truth, of findings the largest such; of numbers the "
    "absolute error in standard deviations of the truth, the mean over names.",
}


def write_report(result: Mapping[str, Any], images: Mapping[str, Path]) -> str:
    """The page. Args: result: as `whole.evaluate` returns it. images: case to image, of those that have one."""
    outcome, outputs, values = arrays(result)
    drawn = outcome_pictures.pictures(outcome, outputs, values)
    figures = "".join(
        f"<figure><h3>{escape(name)}</h3>{_embedded(pictures.png(found))}</figure>" for name, found in drawn.items()
    )
    sections = [
        _head(result),
        _cards(result),
        f'<div class="cases">{figures}</div>',
        f"<h2>Per {'number' if outcome.kind == 'numbers' else 'class'}</h2>",
        _per_class(result),
        _comparison(result),
        "<h2>Worst cases</h2>",
        _worst(result, outcome, images),
        "<h2>What the numbers are</h2><dl>",
        *(f"<dt><b>{name}</b></dt><dd>{text}</dd>" for name, text in _DEFINITIONS.items()),
        "</dl>",
    ]
    return page(sections)


def _head(result: Mapping[str, Any]) -> str:
    lines = [
        f"<h1>Evaluation of {len(result['cases'])} cases</h1>",
        f'<p class="note">predictions <span class="path">{escape(result["predictions"])}</span>',
        f'<br>labels <span class="path">{escape(result["labels"])}</span>',
    ]
    if result["part"]:
        lines.append(f", part {escape(result['part'])}")
    if "compare" in result:
        lines.append(f'<br>compared with <span class="path">{escape(result["compare"]["predictions"])}</span>')
    lines.append(f"<br>medconv {escape(medconv.__version__)}</p>")
    if lacking := result["without_prediction"]:
        named = ", ".join(lacking[:10]) + (", …" if len(lacking) > 10 else "")
        lines.append(f"<p>{len(lacking)} cases have no prediction and are in no number: {escape(named)}</p>")
    return "\n".join(lines)


def _cards(result: Mapping[str, Any]) -> str:
    cards = []
    for name, value in result["mean"].items():
        low, high = result["intervals"].get(name, (None, None))
        ends = "" if low is None else f"<br><span>{_number(low)} to {_number(high)}</span>"
        cards.append(f'<div class="card"><b>{_number(value)}</b><span>{escape(words(name))}</span>{ends}</div>')
    return f'<div class="cards">{"".join(cards)}</div><p class="note">below each its 95 % bootstrap interval over cases</p>'


def _per_class(result: Mapping[str, Any]) -> str:
    columns = list(next(iter(result["per_class"].values())))
    rows = [
        f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{_number(row[column])}</td>" for column in columns) + "</tr>"
        for name, row in result["per_class"].items()
    ]
    return table("<th>name</th>" + "".join(f"<th>{escape(words(column))}</th>" for column in columns), rows)


def _comparison(result: Mapping[str, Any]) -> str:
    if "comparison" not in result:
        return ""
    keys = ("value", "value_compare", "difference", "low", "high", "p")
    rows = [
        f"<tr><td>{escape(words(name))}</td>" + "".join(f"<td>{_number(row[key])}</td>" for key in keys) + "</tr>"
        for name, row in result["comparison"].items()
    ]
    head = "".join(f"<th>{title}</th>" for title in ("metric", "A", "B", "A &minus; B", "low", "high", "p"))
    note = (
        f'<p class="note">A: these predictions, B: those compared with; {result["compare"]["cases"]} cases that both have. '
        "Interval and p from the same 1,000 bootstrap samples of cases for both.</p>"
    )
    return f"<h2>Comparison</h2>{table(head, rows)}{note}"


def _worst(result: Mapping[str, Any], outcome: Outcome, images: Mapping[str, Path]) -> str:
    worst = sorted(result["cases"], key=lambda row: (-row["error"], row["case"]))[:_WORST]
    saliency = Path(result["predictions"]).parent / SALIENCY
    cards = [_case(row, outcome, images.get(row["case"]), saliency / f"{row['case']}.png") for row in worst]
    return f'<p class="note">by their error, the largest first</p><div class="cases">{"".join(cards)}</div>'


def _case(row: Mapping[str, Any], outcome: Outcome, image: Path | None, saliency: Path) -> str:
    outputs = sorted(zip(outcome.names, row["outputs"], strict=True), key=lambda item: -item[1])
    if outcome.kind != "classes":
        known = dict(zip(outcome.names, row["truth"], strict=True))
        outputs = sorted(outputs, key=lambda item: -abs(item[1] - known[item[0]]))
        lines = [f"<tr><td>{escape(n)}</td><td>{known[n]:.4g}</td><td>{v:.4g}</td></tr>" for n, v in outputs[:_SHOWN]]
        shown = table("<th>name</th><th>truth</th><th>predicted</th>", lines)
    else:
        lines = [f"<tr><td>{escape(name)}</td><td>{value:.3f}</td></tr>" for name, value in outputs[:_SHOWN]]
        shown = f"<p>truth: {escape(row['truth'][0])}</p>" + table("<th>class</th><th>probability</th>", lines)
    title = f"{escape(row['case'])} &middot; error {row['error']:.3f}"
    return f"<figure><h3>{title}</h3>{_picture(image, saliency)}{shown}</figure>"


def _picture(image: Path | None, saliency: Path) -> str:
    """What `predict --saliency` drew, else the image; or why there is none."""
    try:
        content = saliency.read_bytes() if saliency.stat().st_size < _BYTES else b""
    except (OSError, ValueError):  # the latter: no possible name
        content = b""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return f"{_embedded(content)}<figcaption>image, and where the answer comes from (Grad-CAM)</figcaption>"
    if image is None:
        return ""
    try:
        array, grid = read_image([image])
    except (ValueError, OSError) as error:
        return f"<figcaption>without the image: {escape(str(error))}</figcaption>"
    turned, spacing = to_canonical(array, grid)
    flat = turned[..., 0] if grid.shape[2] == 1 else turned
    return _embedded(pictures.png(pictures.heat(flat, None, spacing[: flat.ndim - 1])))


def _embedded(content: bytes) -> str:
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(content).decode()}">'


def _number(value: float | None) -> str:
    return "&ndash;" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}".replace("-", "&minus;")
