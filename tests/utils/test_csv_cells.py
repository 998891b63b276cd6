"""medconv/utils/csv_cells.py: no cell is a formula, and each is read back as it was."""

import csv
import io

import pytest

from medconv.utils.csv_cells import csv_text, original


@pytest.mark.parametrize("text", ["=1+1", "+case", "-case", "@SUM(A1)", "\tx", "'=1", "''-x", "-1-2"])
def test_a_formula_gets_an_apostrophe_and_is_read_back(text):
    ((cell,),) = csv.reader(io.StringIO(csv_text([[text]])))
    assert cell == f"'{text}"
    assert original(cell) == text


@pytest.mark.parametrize("text", ["case_1", "'quoted'", "O'Neill", "a=b", "-0.5", "+1e-3", "", "-inf"])
def test_other_cells_stay(text):
    ((cell, second),) = csv.reader(io.StringIO(csv_text([[text, "b"]])))
    assert (cell, second) == (text, "b")
    assert original(cell) == text


def test_numbers_and_missing_values_stay():
    assert csv_text([[-1.5, None, 3], ["a,b", '"', -2]]) == '-1.5,,3\n"a,b","""",-2\n'
