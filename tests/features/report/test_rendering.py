"""medconv/features/report/rendering.py: numbers as reports print them, and templates that miss a variable."""

import jinja2
import pytest

from medconv.features.report import rendering


@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        (None, {}, "\N{EN DASH}"),
        (3, {}, "3"),
        (0.12345, {}, "0.123"),
        (-0.5, {"digits": 1}, "\N{MINUS SIGN}0.5"),
        (0.5, {"digits": 2, "signed": True}, "+0.50"),
        (-0.5, {"digits": 2, "signed": True}, "\N{MINUS SIGN}0.50"),
    ],
)
def test_numbers_have_a_true_minus_sign_and_a_dash_for_none(value, options, text):
    assert rendering.number(value, **options) == text


def test_a_template_without_its_values_is_an_error():
    with pytest.raises(jinja2.UndefinedError):
        rendering.render("segmentation_report.html.j2")
