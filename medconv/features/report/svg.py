"""A figure of matplotlib as inline SVG in the colours of the page around it."""

import warnings
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any
from xml.etree import ElementTree

# CSS variable of report.css: the colour that matplotlib draws; `svg` replaces it by the variable, for
# dark mode.
THEME = {"a": "#0072b2", "b": "#d55e00", "ink": "#1b1f24", "soft": "#5b6470", "line": "#d8dde3"}
Tooltips = dict[str, list[str]]  # id of an SVG group to a text for each mark in it


def svg(figure: Any, tooltips: Mapping[str, Sequence[str]]) -> str:
    """The figure as SVG for an HTML page, reproducible.

    Args:
        figure: matplotlib's.
        tooltips: group id to a text for each mark.
    """
    root = ElementTree.fromstring(_plain_svg(figure))
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img"}
    for element in list(root.iter()):
        # without XML namespaces, as inside HTML
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        if "style" in element.attrib:
            element.attrib["style"] = _with_variables(element.attrib["style"])
    for group in root.findall(".//g[@id]"):
        marks = [element for element in group.iter() if _is_mark(element)]
        texts = tooltips.get(group.attrib.pop("id"), ())
        for mark, tooltip in zip(marks, texts, strict=False):
            ElementTree.SubElement(mark, "title").text = tooltip
    return ElementTree.tostring(root, "unicode")


def _plain_svg(figure: Any) -> str:
    """As matplotlib writes it, without date and random ids."""
    from matplotlib import rc_context

    text = StringIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "medconv", "font.sans-serif": ["DejaVu Sans"]}
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that matplotlib's font lacks; the browser has them
        figure.savefig(text, format="svg", dpi=72, metadata=metadata)
    return text.getvalue()


def _with_variables(style: str) -> str:
    """A CSS style with the page's variables instead of colours."""
    for name, colour in THEME.items():
        style = style.replace(colour, f"var(--{name})")
    return style


def _is_mark(element: ElementTree.Element) -> bool:
    """Not a definition, which has an id."""
    return element.tag in ("use", "path", "text") and "id" not in element.attrib
