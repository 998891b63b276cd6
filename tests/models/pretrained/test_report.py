"""medconv/models/pretrained/report.py: one line for the console, and a table cut to its first rows."""

from medconv.models.pretrained.report import Report


def test_the_line_names_only_what_there_is() -> None:
    assert str(Report(loaded=["a", "b"])) == "2 of 2 tensors loaded"
    report = Report(["a"], {"a": "(2,) to (3,)"}, {"head": "head of other classes"}, {"fc": ""})
    assert str(report) == (
        "1 of 2 tensors loaded, 1 of them reshaped; 1 randomly initialised (head); 1 of the file not used (fc)"
    )


def test_the_table_says_how_many_rows_it_leaves_out() -> None:
    report = Report(loaded=[f"layer{i}" for i in range(14)], unused={"fc": "no such name in the network"})
    lines = report.table().splitlines()
    assert lines[0] == "  not used  fc  no such name in the network"
    assert lines[1] == "  loaded    layer0" and len(lines) == 1 + 12 + 1
    assert lines[-1] == "  loaded    and 2 more"
