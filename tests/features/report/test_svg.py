"""medconv/features/report/distributions.py: reproducible, in the colours of the page, with tooltips."""

import re

from medconv.features.report.distributions import Series, distribution


def test_the_same_values_give_the_same_text_in_the_colours_of_the_page():
    rows = [Series("one", {"x": 1.0, "y": 2.0}, "a"), Series("none", {}, "a"), Series("one", {"x": 3.0}, "b")]
    text = distribution(rows, "%")
    assert text == distribution(rows, "%")
    assert set(re.findall(r"var\(--(\w+)\)", text)) == {"a", "b", "ink", "soft", "line"}
    assert not re.findall(r"(?:fill|stroke): #|https?:|url\(|\bid=\"(?!m)", text)
