"""scripts/golden.py: what a recording holds, and which differences are found."""

import json
import sys

import numpy as np
import pytest
import torch
from helpers.benchmarks_harness import processes_are_forked

import golden

MACHINE = {"processor": "one", "torch": "2"}


def run(monkeypatch, *words):
    """The exit code, or the message, with which the script ends."""
    monkeypatch.setattr(sys, "argv", ["golden.py", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        golden.main()
    return end.value.code


def written(path, runs, only=None, **machine):
    """A recording."""
    content = {"machine": {**MACHINE, **machine}, "only": only, "script": "s", "runs": runs}
    path.write_text(json.dumps(content))
    return path


def test_a_recorded_run_equals_itself_until_its_data_change(monkeypatch, tmp_path, capsys):
    processes_are_forked(monkeypatch)
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    assert run(monkeypatch, "record", one, "--only", "preprocess") == 0
    artefacts = json.loads(one.read_text())["runs"]["preprocess"]["artefacts"]
    assert artefacts.keys() == {"boxes/store", "boxes/fingerprint"}
    content = json.loads(one.read_text())
    content["runs"]["preprocess"]["artefacts"]["boxes/store"] = "another digest"
    other.write_text(json.dumps(content))
    capsys.readouterr()
    assert run(monkeypatch, "compare", one, one) == 0
    assert capsys.readouterr().out == "equal: 1 of 20 runs, 2 artefacts\n"
    assert run(monkeypatch, "compare", one, other) == 1
    assert capsys.readouterr().out == "preprocess: boxes/store\n"


def test_a_recording_that_lacks_something_differs(monkeypatch, tmp_path, capsys):
    complete = {"a": {"artefacts": {"x": "1", "y": "2"}}, "b": {"artefacts": {}}, "c": {"skipped": "no data"}}
    lacking = {"a": {"artefacts": {"x": "1"}}, "b": {"failed": "error"}, "d": {"artefacts": {}}}
    one = written(tmp_path / "one.json", complete)
    assert run(monkeypatch, "compare", one, one) == 0
    assert capsys.readouterr().out == "equal: 2 of 20 runs, 2 artefacts; skipped in both: c\n"
    assert run(monkeypatch, "compare", one, written(tmp_path / "other.json", lacking)) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a: y, only in the first",
        "b: artefacts in the first recording, failed in the second",
        "c: only in the first recording",
        "d: only in the second recording",
    ]


def test_a_run_that_failed_twice_is_not_equal(monkeypatch, tmp_path):
    one = written(tmp_path / "one.json", {"a": {"failed": "error"}})
    assert run(monkeypatch, "compare", one, one) == 1


def test_recordings_of_different_machines_are_not_compared(monkeypatch, tmp_path):
    one = written(tmp_path / "one.json", {})
    message = run(monkeypatch, "compare", one, written(tmp_path / "other.json", {}, torch="3"))
    assert "torch: 2, 3" in message


def test_digests_are_of_content_without_paths_and_times(tmp_path):
    recorder = golden.Recorder(tmp_path / "runs", tmp_path / "checkout")
    content = {
        "_target_": "package.module.Name",
        "wall_seconds": 3.5,
        "where": f"{tmp_path}/runs/a and {tmp_path}/checkout",
        "lr": [0.1, None],
    }
    expected = {"_target_": "Name", "where": "FOLDER/a and CHECKOUT", "lr": [0.1, None]}
    assert recorder.cleaned(content) == expected


def test_digests_of_arrays_notice_type_shape_and_each_bit():
    array = np.zeros((2, 3), np.float32)
    others = [array.astype(np.int32), array.reshape(3, 2), np.full((2, 3), -0.0, np.float32)]
    assert len({golden.array_digest(each) for each in (array, array.copy(), *others)}) == 4
    half = torch.tensor([1.0], dtype=torch.bfloat16)
    assert golden.tensor_digests({"a": half}) != golden.tensor_digests({"a": 2 * half})
