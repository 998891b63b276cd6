"""scripts/benchmarks/workers.py: memory of loader workers, at tiny sizes."""

import argparse

from benchmarks import workers


def test_rows_hold_the_memory_of_workers_and_its_bound(tmp_path):
    parser = argparse.ArgumentParser()
    workers.add_arguments(parser)
    options = (
        "--workers 1 2 --cases 2 --shape 20 18 16 --patch 8 8 8 --samples 8 --augment nothing --names 50"
    )
    rows = workers.run(parser.parse_args([*options.split(), "--scratch", str(tmp_path)]))
    assert [row["workers"] for row in rows] == [1, 2]
    for row in rows:
        assert row["private_MB"] < row["pss_MB"] < row["rss_MB"] <= row["peak_rss_MB"]
        assert row["bound_MB"] == rows[0]["all_pss_MB"] + row["workers"] * row["interpreter_MB"]
        assert row["ratio"] < 1.3
    assert "50 cases of 20x18x16" in workers.show(rows)
