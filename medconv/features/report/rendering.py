"""Self-contained HTML reports from Jinja2 templates, in the folder `templates/` of the feature that reports.

Case ids, class names and paths come from files, so autoescape is on. The only values that a template marks as
safe are charts, in which ElementTree has escaped all text.
"""

import base64
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

import medconv
from medconv.evaluation.results import training_notes

_PACKAGE = "medconv.features.report"
_ENVIRONMENT = Environment(
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.globals["version"] = medconv.__version__


def render(template: str, package: str = _PACKAGE, **values: Any) -> str:
    """The HTML page.

    Args:
        template: a file name in `templates/` of the package; it may extend and include those of this one.
        values: its variables.
    """
    folders = [PackageLoader(each) for each in dict.fromkeys([package, _PACKAGE])]
    environment = _ENVIRONMENT.overlay(loader=ChoiceLoader(folders))
    return environment.get_template(template).render(values)


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


_ENVIRONMENT.filters["base64"] = _base64
_ENVIRONMENT.filters["number"] = number
_ENVIRONMENT.filters["training_notes"] = training_notes
