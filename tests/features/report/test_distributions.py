"""medconv/features/report/distributions.py: box plots as SVG, with a mark and a tooltip for each case, in the
page's colours.
"""

import re
import warnings
from xml.etree import ElementTree

import numpy as np
import pytest

from medconv.features.report.distributions import Series, distribution


def svg(values, unit="mm", title="liver <b>"):
    return ElementTree.fromstring(distribution([Series(title, values, "a")], unit))


def tooltips(root):
    """First those of the dots, then those of the triangles."""
    return [title.text for title in root.iterfind(".//use/title")]


def words(root):
    return [text.text or "" for text in root.iter("text")]


def test_each_case_is_a_dot_or_counted_beyond_the_axis():
    values = {f"case<{i}>": 1 + i / 10 for i in range(9)}
    cases = [f"case<{i}>: {1 + i / 10:.4g}" for i in range(9)]
    assert tooltips(svg(values)) == cases
    far = svg({**values, "far": 80.0})
    assert tooltips(far) == [*cases, "far: 80"] and "80" in words(far)
    ends = [float(word.split()[0]) for word in words(far) if word.endswith(" mm")]
    assert ends[0] <= 1 and 1.8 <= ends[-1] < 10
    two = svg({**values, "far": 80.0, "low": -70.0, "farther": 90.0})
    assert tooltips(two) == [*cases, "low: -70", "far: 80, farther: 90"]
    assert {"-70", "2 cases, to 90"} < set(words(two))
    assert not tooltips(svg({str(i): i / 1000 for i in range(1000)}))


def test_dots_and_box_are_at_their_values_on_the_axis():
    """Five cases from 0 to 4: the dots are evenly spaced between the ticks of 0 and 4, the box from 1 to
    3.
    """
    root = svg({str(i): float(i) for i in range(5)}, "")
    place = {text.text: float(text.attrib["x"]) for text in root.iter("text")}
    expected = np.linspace(place["0"], place["4"], 5)
    drawn = [float(use.attrib["x"]) for use in root.iter("use") if use.find("title") is not None]
    np.testing.assert_allclose(drawn, expected, atol=0.01)
    (box,) = [path for path in root.iter("path") if "fill-opacity: 0.16" in path.attrib.get("style", "")]
    ends = {float(x) for x in re.findall(r"[ML] (\S+)", box.attrib["d"])}
    np.testing.assert_allclose(sorted(ends), expected[[1, 3]], atol=0.01)


@pytest.mark.parametrize(
    "values", [[0.5], [1.0], [0.0, 0.0], [1e-9, 2e-9], [-3.0, 4e6], [0.83, 0.97], [-2.5, 71.3]]
)
def test_few_or_equal_values_get_round_ticks_around_them(values):
    """Ticks are round numbers in order that enclose all values."""
    root = svg({str(i): value for i, value in enumerate(values)}, "")
    assert "nan" not in ElementTree.tostring(root, "unicode").lower()
    marks = [float(word) for word in words(root)[:-1]]
    assert marks[0] <= min(values) and max(values) <= marks[-1] and 2 <= len(marks) <= 13
    np.testing.assert_allclose(np.diff(marks), marks[1] - marks[0], rtol=1e-4)
    if min(values) >= 0 and max(values) <= 1:
        assert marks[0] >= 0 and marks[-1] <= 1


def test_equal_shares_are_shown_on_an_axis_of_all_shares():
    assert words(svg({"a": 1.0, "b": 1.0}, ""))[:-1] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]


def test_without_values_there_is_no_chart():
    assert distribution([Series("liver", {}, "a")], "mm") == ""


@pytest.mark.parametrize("name", ["$x_1$ <b>", "肺炎", "a\x01\nb", "very long " * 9 + "A"])
def test_names_are_escaped_and_shortened(name):
    """`$` starts no formula, and characters that XML forbids are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = distribution([Series(name, {"case": 1.0}, "a")], "")
    assert "<b>" not in text
    shown = words(ElementTree.fromstring(text.replace("\x01", "")))[-1]
    assert shown == {"a\x01\nb": "a  b", "very long " * 9 + "A": "very long very long v… A"}.get(name, name)


def test_the_same_values_give_the_same_text_in_the_colours_of_the_page():
    rows = [Series("one", {"x": 1.0, "y": 2.0}, "a"), Series("none", {}, "a"), Series("one", {"x": 3.0}, "b")]
    text = distribution(rows, "%")
    assert text == distribution(rows, "%")
    assert set(re.findall(r"var\(--(\w+)\)", text)) == {"a", "b", "ink", "soft", "line"}
    assert not re.findall(r"(?:fill|stroke): #|https?:|url\(|\bid=\"(?!m)", text)
