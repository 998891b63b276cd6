"""medconv/features/sweeps/table.py: jobs are ranked by the monitored metric; the table and `sweep.csv` hold their results."""

import csv
import json

import numpy as np

from medconv.features.sweeps import table
from medconv.features.sweeps.job import Job
from medconv.targets.scores import DICE, MAE
from medconv.utils.exit_codes import USER


def test_the_lowest_error_is_first(tmp_path):
    jobs = []
    for number, score in enumerate((3.0, 1.0, None, 2.0)):
        jobs.append(Job((f"seed={number}",), (), tmp_path, 0))
        jobs[-1].folder.path.mkdir(parents=True)
        summary = {"score": MAE.plain(), "val/mae": score, "status": "done"}
        (jobs[-1].folder.path / "summary.json").write_text(json.dumps(summary))
    assert [job.overrides[0][-1] for job in table.ranked(jobs)] == ["1", "3", "0", "2"]
    header, first, *_ = table.write(tmp_path, jobs).read_text().splitlines()
    assert header.startswith("seed,val/mae,steps") and first.startswith("1,1.0")
    assert "1.0000" in table.text(jobs).splitlines()[1]


def test_the_best_dice_is_first_and_failures_are_last_with_their_reason(tmp_path):
    scores = [{"box": 0.5, "hole": 0.7}, {"box": 0.9, "hole": None}]
    jobs = [Job((f"optimizer.lr={rate}", "seed=0"), (), tmp_path, 0) for rate in ("1e-3", "1e-2", "1e-1")]
    for job, dice in zip(jobs, scores, strict=False):
        job.folder.path.mkdir()
        mean = np.mean([value for value in dice.values() if value is not None])
        summary = {"val/dice": mean, "val/dice_per_class": dice, "score": DICE.plain(), "steps": 4}
        (job.folder.path / "summary.json").write_text(json.dumps(summary))
    jobs[2].write_error("no such norm")
    jobs[2].code = USER
    folders = [job.folder.path for job in jobs]
    assert table.text(jobs).splitlines() == [
        "sweep, best first",
        f"  0.9000  {folders[1]}  optimizer.lr=1e-2",
        f"  0.6000  {folders[0]}  optimizer.lr=1e-3",
        f"    -     {folders[2]}  optimizer.lr=1e-1  failed, exit code 1: no such norm",
    ]
    with table.write(tmp_path, jobs).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["optimizer.lr"] for row in rows] == ["1e-2", "1e-3", "1e-1"]
    assert [row["val/dice/box"] for row in rows] == ["0.9", "0.5", ""]
    assert [row["val/dice/hole"] for row in rows] == ["", "0.7", ""]
    assert [row["status"] for row in rows] == ["done", "done", "failed"]
    assert "seed" not in rows[0]  # equal in all jobs
