"""An evaluation as one HTML file that needs nothing else: tables, distributions, the worst cases as pictures.

Case ids, class names and paths come from files; each is escaped where it enters the page.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import medconv
from medconv import metrics, pictures
from medconv.evaluation.charts import Series, distribution
from medconv.evaluation.overlays import case_png
from medconv.evaluation.scores import METRICS, Metric
from medconv.targets import Targets

_WORST = 6  # cases shown
_NAMED = 40  # label values in the legend
_DEFINITIONS = {
    "Dice": "twice the common volume over the sum of both volumes.",
    "Surface Dice": "the share of both surfaces' area within the tolerance of the other one (Nikolov et al. 2018).",
    "HD95": "the 95th percentile of the distances between the boundary voxels, the larger one of the two directions.",
    "ASD": "average symmetric surface distance: the mean over the boundary voxels of both.",
    "Volume error": "prediction minus reference; in per cent of the reference.",
    "A class that is missing": "in both: no value, the case is not counted (n). In one of the two: Dice and surface Dice "
    "are 0, distances are the length of the image from corner to corner.",
    "sd, interval": "standard deviation over cases (n - 1); 95 % bootstrap interval of the mean.",
}


def write_report(result: Mapping[str, Any], paths: Mapping[str, tuple[Path, ...]], images: Mapping[str, Path]) -> str:
    """The page.

    Args: result: as `evaluate` returns it. paths: for each case the reference, the prediction, and the one to compare.
        images: case to image, of those that have one.
    """
    targets = Targets.from_plain(result["targets"])
    sections = [
        _head(result),
        _cards(result["mean"]),
        "<h2>Per class</h2>",
        _per_class(result),
        _comparison(result),
        "<h2>Distributions</h2>",
        '<p class="note">dot: a case; box: quartiles and median; whiskers: cases within 1.5 box lengths; triangle: cases '
        "beyond the axis, with the farthest value</p>",
        _legend(result),
        *(f"<h3>{_title(metric)}</h3>{distribution(_series(result, metric), metric.unit)}" for metric in METRICS),
        "<h2>Worst cases</h2>",
        _worst(result, targets, paths, images),
        "<h2>What the numbers are</h2><dl>",
        *(f"<dt><b>{name}</b></dt><dd>{text}</dd>" for name, text in _DEFINITIONS.items()),
        "</dl>",
    ]
    return page(sections)


def page(sections: Sequence[str]) -> str:
    """HTML that needs nothing else. Args: sections: HTML, in which nothing of a file is left unescaped."""
    style = files("medconv.evaluation").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Evaluation</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{style}</style></head>\n<body>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _head(result: Mapping[str, Any]) -> str:
    lacking = result["without_prediction"]
    tolerances = result["tolerance_mm"]
    same = len(set(tolerances.values())) == 1
    words = (
        f"{next(iter(tolerances.values())):g} mm" if same else ", ".join(f"{n} {mm:g} mm" for n, mm in tolerances.items())
    )
    lines = [
        f"<h1>Evaluation of {len(result['cases'])} cases</h1>",
        f'<p class="note">predictions <span class="path">{escape(result["predictions"])}</span>',
        f'<br>references <span class="path">{escape(result["references"])}</span>',
    ]
    if "compare" in result:
        lines.append(f'<br>compared with <span class="path">{escape(result["compare"]["predictions"])}</span>')
    lines.append(f"<br>surface Dice at {escape(words)} &middot; medconv {escape(medconv.__version__)}</p>")
    if lacking:
        named = ", ".join(lacking[:10]) + (", …" if len(lacking) > 10 else "")
        lines.append(f"<p>{len(lacking)} references have no prediction and are in no number: {escape(named)}</p>")
    return "\n".join(lines)


def _cards(mean: metrics.Row) -> str:
    cards = "".join(
        f'<div class="card"><b>{_number(mean[metric.name], metric)}</b><span>{_title(metric)}</span></div>'
        for metric in METRICS[:4]
    )
    return f'<div class="cards">{cards}</div><p class="note">means over cases, then over classes</p>'


def _per_class(result: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{_title(metric)}</th>" for metric in METRICS)
    rows = []
    for name, values in result["statistics"].items():
        cells = "".join(_cell(values[metric.name], metric) for metric in METRICS)
        rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    means = "".join(f"<td>{_number(result['mean'][metric.name], metric)}</td>" for metric in METRICS)
    rows.append(f'<tr class="mean"><td>mean over classes</td>{means}</tr>')
    note = "mean &plusmn; sd; below it the 95 % interval of the mean, the median, and the cases it is defined in"
    return f'{table(f"<th>class</th>{head}", rows)}<p class="note">{note}</p>'


def _cell(values: Mapping[str, Any], metric: Metric) -> str:
    if not values["n"]:
        return "<td>&ndash;<small>n 0</small></td>"
    mean, sd, median, low, high = (
        _number(values[key], metric, key == "mean") for key in ("mean", "sd", "median", "low", "high")
    )
    spread = "" if values["sd"] is None else f" &plusmn; {sd}"
    interval = "" if values["low"] is None else f"<small>[{low}, {high}]</small>"
    return f"<td>{mean}{spread}{interval}<small>median {median}</small><small>n {values['n']}</small></td>"


def _comparison(result: Mapping[str, Any]) -> str:
    if "comparison" not in result:
        return ""
    rows = []
    for name, values in result["comparison"].items():
        for metric in METRICS:
            rows.append(_difference(name, metric, values[metric.name], result))
    titles = ("class", "metric", "A", "B", "A &minus; B", "95 % interval", "p", "p (Holm)", "n")
    head = "".join(f"<th{' class=word' if title == 'metric' else ''}>{title}</th>" for title in titles)
    note = (
        '<p class="note">A: these predictions, B: those compared with; cases that both have. Volume errors without their '
        "sign. Wilcoxon signed-rank test, two-sided; Holm's correction is over the classes of a metric. "
        "Green: A is better, red: B is, with p (Holm) below 0.05.</p>"
    )
    return f"<h2>Comparison</h2>{table(head, rows)}{note}"


def _difference(name: str, metric: Metric, values: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    means = [_number(values[key], metric) for key in ("mean", "mean_compare")]
    difference, low, high = (_number(values[key], metric, True) for key in ("difference", "low", "high"))
    style = ""
    if values["p_holm"] is not None and values["p_holm"] < 0.05:
        style = ' class="good"' if values["difference"] * (metric.better or -1) > 0 else ' class="bad"'
    cells = [*means, difference, f"[{low}, {high}]", _p(values["p"]), _p(values["p_holm"]), str(values["n"])]
    marked = "".join(f"<td{style if i in (2, 5) else ''}>{cell}</td>" for i, cell in enumerate(cells))
    return f'<tr><td>{escape(name)}</td><td class="word">{_title(metric)}</td>{marked}</tr>'


def _legend(result: Mapping[str, Any]) -> str:
    if "compare" not in result:
        return ""
    sets = (("a", "A", result["predictions"]), ("b", "B", result["compare"]["predictions"]))
    marks = "".join(
        f'<span><i class="swatch" style="background: var(--{style})"></i>{title}: {escape(path)}</span>'
        for style, title, path in sets
    )
    return f'<p class="legend note">{marks}</p>'


def _series(result: Mapping[str, Any], metric: Metric) -> list[Series]:
    sets = [("a", result["cases"])] + ([("b", result["compare"]["cases"])] if "compare" in result else [])
    scale = 100 if metric.unit == "%" else 1
    rows = []
    for name in result["per_class"]:
        for style, cases in sets:
            found = {row["case"]: row[metric.name][name] for row in cases}
            values = {case: scale * value for case, value in found.items() if value is not None}
            rows.append(Series(f"{name} {style.upper()}" if len(sets) > 1 else name, values, style))
    return rows


def _worst(
    result: Mapping[str, Any], targets: Targets, paths: Mapping[str, tuple[Path, ...]], images: Mapping[str, Path]
) -> str:
    scored = [(metrics.mean(row["dice"]), row) for row in result["cases"]]
    worst = sorted(((score, row["case"], row) for score, row in scored if score is not None), key=lambda item: item[:2])[
        :_WORST
    ]
    if not worst:
        return '<p class="note">no case has a defined Dice</p>'
    legend = "".join(
        f'<span><i class="swatch" style="background: {pictures.colour(value)}"></i>{escape(names)}</span>'
        for value, names in _painted(targets).items()
    )
    cards = [_case(score, row, paths[case], images.get(case), targets.ignore) for score, case, row in worst]
    note = "by mean Dice, the lowest first; cut where reference and prediction differ most"
    return f'<p class="note">{note}</p><p class="legend note">{legend}</p><div class="cases">{"".join(cards)}</div>'


def _case(score: float, row: Mapping[str, Any], labels: tuple[Path, ...], image: Path | None, ignore: int | None) -> str:
    lacking = ""
    try:
        content = case_png(labels, image, ignore)
    except ValueError as error:
        content, lacking, image = case_png(labels, None, ignore), f"; without the image: {error}", None
    columns = ["reference", "prediction"] if len(labels) == 2 else ["reference", "prediction A", "prediction B"]
    columns = (["image"] if image else []) + columns
    shown = METRICS[:4]
    rows = [
        f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{_number(row[m.name][name], m)}</td>" for m in shown) + "</tr>"
        for name, value in sorted(row["dice"].items(), key=lambda item: (item[1] is None, item[1]))[:8]
    ]
    shown_table = table("<th>class</th>" + "".join(f"<th>{_title(m)}</th>" for m in shown), rows)
    source = base64.b64encode(content).decode()
    return (
        f"<figure><h3>{escape(row['case'])} &middot; Dice {score:.3f}</h3>"
        f'<img alt="" src="data:image/png;base64,{source}">'
        f"<figcaption>{', '.join(columns)}{escape(lacking)}</figcaption>{shown_table}</figure>"
    )


def _painted(targets: Targets) -> dict[int, str]:
    """Label value to what it means, as the pictures show it; more than seven share colours."""
    values = sorted({value for group in targets.values for value in group})[:_NAMED]
    known = {v: [n for n, group in targets.by_name.items() if v in group] for v in values}
    return {value: " + ".join(names) for value, names in known.items()}


def table(head: str, rows: list[str]) -> str:
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _title(metric: Metric) -> str:
    return metric.title + (f", {metric.unit}" if metric.unit else "")


def _number(value: float | None, metric: Metric, signed: bool = False) -> str:
    if value is None:
        return "&ndash;"
    number = 100 * value if metric.unit == "%" else value
    sign = "+" if signed and metric.better == 0 else ""
    return f"{number:{sign}.{2 if metric.unit else 3}f}".replace("-", "&minus;")


def _p(value: float | None) -> str:
    return "&ndash;" if value is None else "&lt; 0.001" if value < 0.001 else f"{value:.3f}"
