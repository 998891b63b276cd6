import numpy as np
import pytest

from medconv.metrics import figures


@pytest.mark.parametrize(("panels", "shape"), [(1, (400, 400)), (3, (400, 1200)), (4, (800, 1200))])
def test_panels_are_three_a_row(panels: int, shape: tuple[int, int]) -> None:
    figure, axes = figures.panel_grid(panels)
    assert len(axes) == panels
    assert figures.pixels(figure).shape == (*shape, 3)


def test_a_long_name_is_shortened_to_one_line_without_formulas() -> None:
    assert figures.text("two\nlines") == "two lines"
    assert figures.text("$x$") == r"\$x\$"
    assert len(figures.text("a" * 40)) == len(figures.text("b" * 24)) == 24


def test_a_legend_names_what_it_leaves_out() -> None:
    figure, axes = figures.one_panel()
    empty = figures.pixels(figure)
    figures.add_legend(axes, hidden_curves=3, undefined=["a", "b", "c", "d"])
    assert axes.texts[0].get_text() == "and 3 more\nundefined: a, b, c, …"
    assert not np.array_equal(figures.pixels(figure), empty)
