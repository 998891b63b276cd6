"""medconv/evaluation/results.py: an output is checked before the work."""

import pytest

from medconv.evaluation.results import check_writable, table_path
from medconv.utils.errors import ArgumentError


def test_an_output_that_would_replace_what_is_read_is_refused(tmp_path):
    """Also where the table is written beside the output, and by another spelling of its path."""
    table = tmp_path / "predictions.csv"
    table.touch()
    with pytest.raises(ArgumentError, match="^output .*: would replace .*predictions.csv, which"):
        check_writable(tmp_path / "sub/../predictions.json", [table])


def test_a_writable_output_leaves_no_probe(tmp_path):
    check_writable(tmp_path / "new/metrics.json", [])
    assert list((tmp_path / "new").iterdir()) == []


def test_the_table_of_a_folder_is_found(tmp_path):
    assert table_path(tmp_path) == tmp_path / "predictions.csv"
    assert table_path(tmp_path / "mine.csv") == tmp_path / "mine.csv"
