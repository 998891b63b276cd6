"""`medconv preprocess`, and training on a dataset with invalid cases."""

import json
import os
import signal
from contextlib import contextmanager

import pytest
from helpers import tiny
from helpers.preprocess_command import overrides, run_preprocess
from helpers.processes import Forked
from helpers.stores import before_each_file

from medconv.data.datasets.dataset_json import msd
from medconv.data.splits import split_fold
from medconv.utils.exit_codes import DONE, PREEMPTED, USER

COUNT = 10  # cases


@contextmanager
def signalled_before(name, number):
    """A process that is started inside sends itself a signal before a file of the store is in place."""
    with before_each_file(lambda path: os.kill(os.getpid(), number) if path.name == name else None):
        yield


def test_help_and_config_are_printed(tmp_path, monkeypatch, capsys):
    out, _ = run_preprocess(["--help"], tmp_path, monkeypatch, capsys)
    assert "--check-only" in out and "--verify" in out and "data=msd" in out
    out, _ = run_preprocess(["data=msd", "--cfg", "job", "-p", "data"], tmp_path, monkeypatch, capsys)
    assert "on_invalid_case: raise" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.rot=x"], "there is no key data.rot; did you mean data.root"),
        (["data=nowhere"], "there is no data=nowhere; Options: auto"),
        (["data=msd", "data.root=null"], "data.root is not set"),
        (["data.on_invalid_case=ignore"], "data.on_invalid_case must be raise or skip, got ignore"),
        (["--check-only", "--verify"], "not allowed with argument --check-only"),
        (["--check"], "check"),
    ],
)
def test_a_bad_configuration_is_one_error(arguments, message, tmp_path, monkeypatch, capsys):
    assert message in run_preprocess(arguments, tmp_path, monkeypatch, capsys, USER)[1]


def test_a_killed_command_resumes(tmp_path):
    """It gets SIGKILL before its last cases."""
    root, cache = tiny.write_dataset(tmp_path / "data", cases=COUNT, shape=(64, 64, 64)), tmp_path / "cache"
    arguments = [*overrides(root, cache), "data.spacing_mm=[0.9,1.3,1.9]", "data.prepare_workers=1"]
    with signalled_before("case_2.json", signal.SIGKILL):
        first = Forked(*arguments, cwd=tmp_path, command="preprocess")
    assert first.wait()[0] == -signal.SIGKILL
    prepared = list(cache.glob("*/*/case_*.json"))
    assert len(prepared) == 2
    before = {path: path.stat().st_mtime_ns for path in prepared}
    code, output = Forked(*arguments, cwd=tmp_path, command="preprocess").wait()
    assert code == DONE, output
    assert f"preparing {COUNT - len(prepared)} of {COUNT} cases" in output
    assert {path: path.stat().st_mtime_ns for path in prepared} == before
    assert len(list(cache.glob("*/*/case_*.json"))) == COUNT and not list(cache.glob("*/*/.*"))


def test_two_concurrent_commands_share_the_work(tmp_path):
    root, cache = tiny.write_dataset(tmp_path / "data", cases=6), tmp_path / "cache"
    both = [Forked(*overrides(root, cache), cwd=tmp_path, command="preprocess") for _ in range(2)]
    codes, outputs = zip(*(process.wait() for process in both), strict=True)
    assert codes == (DONE, DONE), outputs
    assert any("preparing 6 of 6 cases" in output for output in outputs)
    assert all("prepared  6 cases" in output for output in outputs)


def test_paths_may_have_spaces_and_letters_of_any_alphabet(tmp_path):
    home = tmp_path / "Größe und 患者"
    home.mkdir()
    root = tiny.write_dataset(home / "mes données")
    for name in ("imagesTr", "labelsTr"):
        (root / name / "case_0.nii.gz").rename(root / name / "Fall é 0.nii.gz")
    meta = (root / "dataset.json").read_text().replace("case_0.nii.gz", "Fall é 0.nii.gz")
    (root / "dataset.json").write_text(meta, encoding="utf-8")
    arguments = ["data=msd", f"data.root='{root}'", f"data.cache_dir='{home / 'der Cache'}'", *tiny.SMALL]
    code, output = Forked(*arguments, cwd=home, command="preprocess").wait()
    assert code == DONE and f"store     {home / 'der Cache'}" in output, output
    run_dir = f"run.dir='{home / 'ein Lauf'}'"
    code, output = Forked(*arguments, "data.num_workers=1", run_dir, cwd=home).wait()
    assert code == DONE, output
    assert json.loads((home / "ein Lauf/summary.json").read_text())["status"] == "done"
    flags = ["--checkpoint", str(home / "ein Lauf/checkpoints/best.ckpt"), "--input", str(root / "imagesTr")]
    code, output = Forked(*flags, "--output", str(home / "aus gabe"), cwd=home, command="predict").wait()
    assert code == DONE, output
    assert (home / "aus gabe/Fall é 0.nii.gz").is_file()


def test_training_skips_invalid_cases_and_lists_them(tmp_path, caplog):
    root = tiny.write_dataset(tmp_path / "data")
    train, val = split_fold(msd(root).cases, 0, 3)
    invalid = [train[0].id, val[0].id]
    for case in invalid:
        (root / f"imagesTr/{case}.nii.gz").write_bytes(b"")
    with pytest.raises(ValueError, match="2 errors in 7 cases"):
        tiny.train(root, tmp_path / "raise")
    summary = tiny.train(root, tmp_path / "skip", "data.on_invalid_case=skip")
    assert summary["status"] == "done"
    assert sorted(summary["skipped_cases"]) == sorted(invalid)
    assert all("the file is empty (0 bytes)" in error for error in summary["skipped_cases"].values())
    assert sorted(summary["val/cases"]) == sorted(case.id for case in val if case.id not in invalid)
    assert "data.on_invalid_case=skip skips 2 of 7 cases\n  case case_" in caplog.text
    again = tiny.train(tiny.write_dataset(tmp_path / "good"), tmp_path / "none", "data.on_invalid_case=skip")
    assert again["skipped_cases"] == {}


def test_training_without_a_valid_case_is_an_error(tmp_path):
    root = tiny.write_dataset(tmp_path / "data")
    train, _ = split_fold(msd(root).cases, 1, 3)
    for case in train:
        case.images[0].write_bytes(b"")
    with pytest.raises(ValueError, match=r"data\.fold=1: no case is left to train on, all cases are invalid"):
        tiny.train(root, tmp_path / "run", "data.on_invalid_case=skip", "data.fold=1")


def test_sigterm_ends_preprocessing_with_the_exit_code_of_training(tmp_path):
    root = tiny.write_dataset(tmp_path / "data", cases=COUNT, shape=(64, 64, 64))
    arguments = [*overrides(root, tmp_path / "cache"), "data.prepare_workers=1"]
    with signalled_before("case_2.json", signal.SIGTERM):
        process = Forked(*arguments, cwd=tmp_path, command="preprocess")
    code, output = process.wait()
    assert code == PREEMPTED, output
    assert "stopped by SIGTERM" in output and "Traceback" not in output
    assert len(list((tmp_path / "cache").glob("*/*/case_*.json"))) < COUNT
