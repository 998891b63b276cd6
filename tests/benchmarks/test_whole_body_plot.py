"""scripts/benchmarks/whole_body_plot.py: a chart of rows."""

from benchmarks import whole_body_plot


def test_every_variant_has_a_line_in_every_panel(tmp_path):
    rows = [
        {"variant": variant, "voxels": voxels, "classes": classes, "seconds": 1.0 + classes, "peak_gib": 0.5}
        for variant in ("ours", "theirs")
        for voxels in (10**6, 10**7)
        for classes in (3, 20)
    ]
    whole_body_plot.draw(rows, tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text()
    for words in ("ours", "theirs", "20 classes", "10 million voxels", "CPU seconds", "GiB"):
        assert f">{words}</text>" in text
    whole_body_plot.draw(rows, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text
