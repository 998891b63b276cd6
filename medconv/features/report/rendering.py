"""Self-contained HTML reports from the Jinja2 templates in `templates/`.

Case ids, class names and paths come from files, so autoescape is on. The only values that a template marks as
safe are charts, in which ElementTree has escaped all text.
"""

import base64
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import medconv
from medconv.evaluation.results import training_notes

_TEMPLATES = Environment(
    loader=PackageLoader("medconv.features.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.globals["version"] = medconv.__version__


def render(template: str, **values: Any) -> str:
    """The HTML page.

    Args:
        template: a file name in `templates/`.
        values: its variables.
    """
    return _TEMPLATES.get_template(template).render(values)


def number(value: float | None, digits: int = 3, signed: bool = False) -> str:
    """A number as reports print it: with a true minus sign; a dash for None; integers without decimals."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, int):
        return str(value)
    sign = "+" if signed else ""
    return f"{value:{sign}.{digits}f}".replace("-", "\N{MINUS SIGN}")


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


_TEMPLATES.filters["base64"] = _base64
_TEMPLATES.filters["number"] = number
_TEMPLATES.filters["training_notes"] = training_notes
