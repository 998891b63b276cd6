"""The table of image-level predictions: its rows, resuming, and tables that are not replaced."""

import os
from pathlib import Path

import numpy as np
import pytest
from helpers.members import refused

from medconv.data.case import Case
from medconv.data.io.manifest import MANIFEST
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.output import TABLE, OutputTable

CLASSES = MulticlassTargets(("benign", "case"))


def cases(*names):
    return [Case(name, (Path("/images") / f"{name}.png",)) for name in names]


def table(path, **settings):
    return OutputTable(path, CLASSES, {"mirror_axes": [], **settings}, {"checkpoint": "x"})


def fill(output, listed, overwrite=False):
    """Add a row for each remaining case; returns their names."""
    done = []
    with output.open(listed, overwrite):
        for case, _ in output.claims(listed):
            output.add(case, np.array([0.25, 0.75]))
            done.append(case.id)
    return done


def test_rows_are_in_the_order_of_the_cases_and_resume_after_a_cut_off_line(tmp_path):
    assert fill(table(tmp_path), cases("b", "a")) == ["b", "a"]
    with (tmp_path / TABLE).open("a") as file:
        file.write("c,ben")  # as a killed process leaves it
    assert fill(table(tmp_path), cases("a", "b", "c")) == ["c"]
    assert (tmp_path / TABLE).read_text().splitlines() == [
        "case,predicted,benign,output/case",
        *(f"{name},case,0.25,0.75" for name in "abc"),
    ]


def test_a_stopped_command_keeps_its_rows(tmp_path):
    output = table(tmp_path)
    with pytest.raises(KeyboardInterrupt), output.open(cases("a", "b")):
        output.add(cases("a")[0], np.array([0.5, 0.5]))
        raise KeyboardInterrupt
    assert fill(table(tmp_path), cases("a", "b")) == ["b"]


def test_a_file_name_that_is_no_text_is_found_again(tmp_path):
    named = cases(os.fsdecode(b"M\xfcller"), "b")
    assert fill(table(tmp_path), named[:1]) == [named[0].id]
    assert fill(table(tmp_path), named) == ["b"]
    assert (tmp_path / TABLE).read_text().splitlines()[1] == r"M\udcfcller,case,0.25,0.75"


def test_a_table_that_the_manifest_does_not_list_is_refused(tmp_path):
    (tmp_path / TABLE).write_text("case,predicted\nz,benign\n")
    with refused(rf"holds predictions that {MANIFEST} does not list, such as z; take another folder"):
        fill(table(tmp_path), cases("a"), overwrite=True)


def test_a_folder_in_which_another_process_works_is_refused(tmp_path):
    with (
        table(tmp_path).open(cases("a")),
        refused("another process writes its predictions there"),
        table(tmp_path).open(cases("b")),
    ):
        pass
    assert fill(table(tmp_path), cases("a", "b")) == ["a", "b"]
