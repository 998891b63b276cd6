"""scripts/benchmarks/preparing.py: every step has a time, and ratios are those to decompression and resampling."""

import argparse

import pytest

from benchmarks import preparing


def test_each_step_has_a_row_and_the_reference_has_a_ratio_of_one():
    parser = argparse.ArgumentParser()
    preparing.add_arguments(parser)
    rows = preparing.run(parser.parse_args(["--shape", "64", "48", "40", "--rounds", "2"]))
    by_name = {row["variant"]: row for row in rows}
    assert by_name[preparing.REFERENCE]["ratio"] == pytest.approx(1)
    assert {"prepare in all", "check"} < set(by_name)
    assert all(row["seconds"] > 0 for row in rows)
    assert "prepare in all" in preparing.show(rows)
