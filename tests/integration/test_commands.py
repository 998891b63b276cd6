"""Whole commands: sweeps, several processes, and data with errors; one message and an exit code."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import ranks, tiny
from helpers.processes import FORKED, Forked

from medconv.features.sweeps import run as sweep
from medconv.utils.exit_codes import DONE, USER


@pytest.fixture(scope="module")
def checkpoint(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "done"
    tiny.train(dataset, folder)
    return folder / "checkpoints/best.ckpt"


def fails(command, arguments, cwd, monkeypatch, capsys):
    """Run a command in this process; it must exit with 1 and print one error without a traceback."""
    monkeypatch.chdir(cwd)
    code = tiny.call(monkeypatch, command, *arguments)
    errors = capsys.readouterr().err
    assert code == USER, errors
    assert "Traceback" not in errors
    assert errors.count("error:") == 1, errors
    return errors


def test_a_sweep_leaves_a_folder_per_job_and_survives_a_failed_one(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "subprocess", FORKED)
    arguments = tiny.overrides(
        dataset, "trainer.max_steps=2", "data.samples_per_epoch=4", "trainer.limit_val_batches=1"
    )
    code, output = Forked("-m", *arguments, "model.norm=batch,nonsense", "run.name=both", cwd=tmp_path).wait()
    assert code == USER, output
    assert "error: model: norm must be one of" in output
    folders = [p for p in (tmp_path / "runs/both").iterdir() if p.is_dir()]
    assert len(folders) >= 1
    (summary,) = [json.loads(p.read_text()) for p in (tmp_path / "runs/both").glob("*/summary.json")]
    assert summary["status"] == "done"
    assert "sweep, best first" in output
    reason = "exit code 1: model: norm must be one of ['batch', 'instance'], got 'nonsense'"
    assert f"model.norm=nonsense  failed, {reason}\n" in output
    with (tmp_path / "runs/both/sweep.csv").open(newline="") as file:
        best, failed = csv.DictReader(file)
    assert best["model.norm"] == "batch" and float(best["val/dice"]) == summary["val/dice"]
    assert float(best["val/dice/box"]) == summary["val/dice_per_class"]["box"] and best["val/dice/hole"]
    assert (
        best["steps"] == "2"
        and best["status"] == "done"
        and Path(best["folder"]) in [p.relative_to(tmp_path) for p in folders]
    )
    assert float(best["samples_per_second"]) == summary["samples_per_second"] and best["wall_seconds"]
    assert (failed["status"], failed["reason"], failed["val/dice"]) == ("failed", reason, "")


@pytest.mark.slow
def test_a_sweep_of_jobs_with_two_processes(dataset, tmp_path):
    """Lightning starts the second process from the command line: the sweep must not start over in it."""
    arguments = tiny.overrides(dataset, "trainer.max_steps=2", "trainer.devices=2", "trainer.strategy=ddp")
    done = tiny.command("train.py", "-m", *arguments, "seed=1", "run.name=pairs", cwd=tmp_path)
    assert done.returncode == DONE, done.stderr
    summaries = [json.loads(p.read_text()) for p in (tmp_path / "runs/pairs").glob("*/summary.json")]
    assert [(s["status"], s["hardware"]["devices"]) for s in summaries] == [("done", 2)]


def test_a_run_does_not_resume_with_other_cases(dataset, tmp_path):
    """A case that was skipped and then mended would change what every sample number means."""
    folder = tmp_path / "data" / "tiny"
    shutil.copytree(dataset, folder)
    (broken := folder / "imagesTr/case_1.nii.gz").write_bytes(b"")
    first = tiny.train(folder, tmp_path / "run", "data.on_invalid_case=skip")
    assert list(first["skipped_cases"]) == ["case_1"]
    shutil.copy(dataset / "imagesTr/case_1.nii.gz", broken)
    with pytest.raises(
        ValueError,
        match=r"run with another config or other data; .*run.resume=\S+last.ckpt it continues from there.*\n(.*\n)*  derived\.train_cases: \d cases, \w+ there, \d cases, \w+ now",
    ):
        tiny.train(folder, tmp_path / "run", "data.on_invalid_case=skip", "trainer.max_steps=8")


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_processes_give_the_result_of_one(dataset, tmp_path, strategy):
    """With deep supervision. SGD, because AdamW takes a full-length step even for a gradient that is only
    rounding error. With ddp as a user, or a sweep, starts it: Lightning starts
    the second process.
    """
    same = ["model.norm=instance", "data.samples_per_epoch=12", "trainer.max_steps=6", "optimizer=sgd"]
    same += [
        "task.deep_supervision=true",
        "model.channels=[4,6,8,8]",
        "model.strides=[2,2,2]",
        "data.patch_size=[16,16,16]",
    ]
    one = tiny.train(dataset, tmp_path / "one", *same, "data.batch_size=4")
    arguments = tiny.overrides(
        dataset, *same, "data.batch_size=2", "trainer.devices=2", f"trainer.strategy={strategy}"
    )
    arguments.append(f"run.dir={tmp_path / 'two'}")
    if strategy == "ddp":
        done = ranks.python(tiny.ROOT / "train.py", *arguments, cwd=tmp_path)
        codes, stdout, stderr = [done.returncode], done.stdout, done.stderr
    else:
        ended = ranks.run(*arguments, cwd=tmp_path)
        codes, stdout, stderr = ended.codes, "".join(ended.stdout), "".join(ended.stderr)
    assert set(codes) == {DONE}, stderr
    assert "4 samples in each step" in stdout
    assert "warning" not in stderr
    assert "GPU available" not in stdout + stderr  # Lightning's own handlers, which its import adds
    two = json.loads((tmp_path / "two/summary.json").read_text())
    assert two["steps"] == one["steps"] == 6
    assert sorted(two["val/cases"]) == sorted(one["val/cases"])  # each case once, on whichever rank
    states = [
        torch.load(tmp_path / n / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for n in ("one", "two")
    ]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-4, atol=1e-5)
    assert two["val/dice"] == pytest.approx(one["val/dice"], abs=1e-3)


def test_predict_names_the_case_that_fails_and_does_the_rest(checkpoint, tmp_path, monkeypatch, capsys):
    images = tiny.write_dataset(tmp_path / "more", cases=3) / "imagesTr"
    (images / "case_1.nii.gz").write_bytes(b"damaged")
    arguments = ["--checkpoint", str(checkpoint), "--input", str(images), "--output", "out"]
    errors = fails("predict", arguments, tmp_path, monkeypatch, capsys)
    assert "1 of 3 cases could not be predicted" in errors
    assert "case case_1" in errors
    assert sorted(p.name for p in (tmp_path / "out").glob("*.nii.gz")) == ["case_0.nii.gz", "case_2.nii.gz"]
