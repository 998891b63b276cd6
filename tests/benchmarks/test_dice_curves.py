"""scripts/benchmarks/dice_curves.py: the chart of Dice over training time."""

import re
from xml.etree import ElementTree

import pytest

from benchmarks import dice_curves


def test_a_published_number_is_a_dotted_line_on_the_axis(tmp_path):
    path = tmp_path / "p.svg"
    dice_curves.draw([dice_curves.Curve("a", ((10, 0.5), (100, 0.6)), 0.6, published=0.9)], path, "")
    texts = path.read_text()
    assert texts.count("stroke-dasharray: 1,1.65") == 1 and ">0.9<" in texts


def test_the_dice_axis_is_logarithmic_in_its_distance_from_one(tmp_path):
    curves = [
        dice_curves.Curve("a <b>", ((10, 0.0), (100, 0.9), (1000, 0.99)), 0.99),
        dice_curves.Curve("c_$1", ((10, 0.5), (1000, 0.8)), 0.8),
        dice_curves.Curve("a <b>", ((5, 0.2), (50, 0.5)), 0.5),
    ]
    dice_curves.draw(curves, tmp_path / "p.svg", "title & $more$")
    tree = ElementTree.fromstring((tmp_path / "p.svg").read_text())
    tag = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in tree.iter(f"{tag}text")]
    assert {"title & $more$", "a <b>", "c_$1", "0.990", "0.800", "10 s", "0.9"} <= set(texts)
    assert texts.count("a <b>") == 1
    lines = [path for path in tree.iter(f"{tag}path") if "stroke-width: 1.5" in path.get("style", "")]
    first, second, third = lines[:3]  # the best result first; those of the legend come after them
    numbers = [float(number) for number in re.findall(r"[\d.]+", first.attrib["d"])]
    (x0, y0), (x1, y1), (x2, y2) = zip(numbers[::2], numbers[1::2], strict=True)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert x2 > x0 > 0 and y0 > y2 > 0

    def colour(line):
        return re.search(r"stroke: (#\w+)", line.attrib["style"])[1]

    assert colour(first) == colour(third) != colour(second)
