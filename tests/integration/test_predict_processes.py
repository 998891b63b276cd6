"""`medconv predict` in processes of its own: killed, shared, stopped, on a full disk.

They are forks of this process.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from itertools import count

import nibabel as nib
import numpy as np
import pytest
from helpers import members, tiny
from helpers.processes import Forked
from helpers.small_disk import on_small_disk
from helpers.waiting import until
from nibabel.openers import ImageOpener

from medconv.inference.output import OutputDir

NUMBER = 5
WHOLE = "[!.]*.nii.gz"  # and not what is being written


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Of a command that takes 0.1 s a case: long enough for the slow tests to interrupt it."""
    home = tmp_path_factory.mktemp("processes")
    images, checkpoint = members.train(home)
    for i in range(NUMBER):
        array = nib.load(images / f"case_{i}.nii.gz").get_fdata().astype(np.float32)
        (home / "large").mkdir(exist_ok=True)
        nib.save(
            nib.Nifti1Image(np.tile(array, (2, 2, 2)), np.diag([1.0, 1.5, 2, 1])),
            home / f"large/case_{i}.nii.gz",
        )
    options = {"--checkpoint": checkpoint, "--input": home / "large", "--device": "cpu", "--overlap": 0.75}
    return [str(word) for pair in options.items() for word in pair]


@pytest.fixture(scope="module")
def serial(flags, tmp_path_factory):
    output = tmp_path_factory.mktemp("serial") / "out"
    code, messages = start(flags, output).wait()
    assert code == 0, messages
    assert f"{NUMBER} of {NUMBER} predictions are in {output}: {NUMBER} new, 0 already there" in messages
    return output


def start(flags, output):
    return Forked(*flags, "--output", str(output), cwd=output.parent, command="predict")


def wait_for(number, output):
    until(lambda: len(list(output.glob(WHOLE))) >= number, pause=0.005)


def assert_same(output, serial):
    assert {p.name for p in output.iterdir()} == {p.name for p in serial.iterdir()}
    for path in serial.glob("*.nii.gz"):
        image, expected = nib.load(output / path.name), nib.load(path)
        np.testing.assert_array_equal(np.asarray(image.dataobj), np.asarray(expected.dataobj))
        np.testing.assert_array_equal(image.affine, expected.affine)


@contextmanager
def signalled(owner, name, number, at=1):
    """A process that is started inside sends itself a signal before it calls a function for the n-th time.

    Args: at: which call.
    """
    function = getattr(owner, name)
    calls = count(1)

    def signals(*arguments):
        if next(calls) == at:
            os.kill(os.getpid(), number)
        return function(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, signals)
        yield


def test_killed_and_continued(flags, serial, tmp_path):
    output = tmp_path / "out"
    with signalled(OutputDir, "write", signal.SIGKILL, at=3):
        process = start(flags, output)
    assert process.wait()[0] == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in output.glob(WHOLE)}
    assert len(before) == 2 and (output / ".claims").is_dir()
    code, messages = start(flags, output).wait()
    assert code == 0, messages
    assert f"{NUMBER - len(before)} new, {len(before)} already there" in messages
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert_same(output, serial)


def test_killed_while_it_writes_probabilities(flags, tmp_path):
    """A case whose probabilities are half written has no label map, so it is done again."""
    output = tmp_path / "out"
    with_probabilities = [*flags, "--save-probabilities"]
    with signalled(
        ImageOpener, "write", signal.SIGKILL, at=130
    ):  # each case writes 72 planes and a label map
        process = start(with_probabilities, output)
    assert process.wait()[0] == -signal.SIGKILL
    assert len(list(output.glob("probabilities/.*.nii.gz"))) == 1
    done = {path.name for path in output.glob(WHOLE)}
    assert len(done) == 1 and done == {path.name for path in output.glob(f"probabilities/{WHOLE}")}
    code, messages = start(with_probabilities, output).wait()
    assert code == 0, messages
    assert f"{NUMBER - len(done)} new" in messages
    assert {path.name for path in output.iterdir()} - {".lock", "prediction.json", "probabilities"} == {
        f"case_{i}.nii.gz" for i in range(NUMBER)
    }
    for path in output.glob(WHOLE):
        probabilities = nib.load(output / "probabilities" / path.name).get_fdata()
        np.testing.assert_array_equal(probabilities.argmax(-1), np.asarray(nib.load(path).dataobj))
    assert len(list((output / "probabilities").iterdir())) == NUMBER


def test_three_processes_share_a_list(flags, serial, tmp_path):
    processes = [start(flags, tmp_path / "out") for _ in range(3)]
    ended = [process.wait() for process in processes]
    assert [code for code, _ in ended] == [0, 0, 0], ended
    assert sum(int(re.search(r"(\d+) new", messages)[1]) for _, messages in ended) == NUMBER
    assert_same(tmp_path / "out", serial)
    assert len(json.loads((tmp_path / "out/prediction.json").read_text())["cases"]) == NUMBER


def test_stopped(flags, tmp_path):
    output = tmp_path / "out"
    with signalled(OutputDir, "write", signal.SIGTERM, at=2):
        process = start(flags, output)
    code, messages = process.wait()
    assert code == 75, messages
    assert (
        "stopped by SIGTERM; run the same command again to resume\n" in messages
        and "Traceback" not in messages
    )
    assert not (output / ".claims").exists() and not [p for p in output.glob(".*") if p.name != ".lock"]
    predictions = list(output.glob("*.nii.gz"))
    assert 1 <= len(predictions) < NUMBER
    assert all(np.asarray(nib.load(path).dataobj).shape == (32, 36, 24) for path in predictions)


def test_a_full_disk(flags, serial, tmp_path):
    """A real one: no room for the probabilities of all; what was written stays."""

    def predict():
        words = [*flags, "--save-probabilities", "--output", str(tmp_path / "disk/out")]
        ended = Forked(*words, cwd=tmp_path, command="predict").wait()
        (tmp_path / "ended.json").write_text(json.dumps(ended))
        shutil.copytree(tmp_path / "disk/out", tmp_path / "out")

    on_small_disk(tmp_path / "disk", "1000k", predict)
    code, messages = json.loads((tmp_path / "ended.json").read_text())
    assert code == 1, messages
    (error,) = [line for line in messages.splitlines() if "error" in line]
    assert re.match(
        r"error: case case_\d: no room in \S+/disk/out \(No space left on device\), 0\.\d MB are free", error
    )
    assert "Traceback" not in messages
    predictions = list((tmp_path / "out").glob("*.nii.gz"))
    assert 1 <= len(predictions) < NUMBER and not list((tmp_path / "out").glob("**/.*.nii.gz"))
    for path in predictions:
        probabilities = np.asarray(nib.load(tmp_path / "out/probabilities" / path.name).dataobj)
        assert probabilities.shape == (32, 36, 24, 3) and probabilities.dtype == np.float32
        np.testing.assert_array_equal(
            probabilities.argmax(-1), np.asarray(nib.load(serial / path.name).dataobj)
        )


def array_task(number, flags, output):
    """As Slurm starts a task of scripts/slurm/predict.sbatch; `scontrol` notes what it is asked for, `srun` its step."""
    tools = output.parent / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> "{output.parent}/asked"\n')
    (tools / "squeue").write_text("#!/bin/sh\necho RUNNING\n")
    (tools / "srun").write_text(
        f'#!/bin/sh\nwhile [ "${{1#--}}" != "$1" ]; do shift; done\necho $$ > "{output.parent}/step"\nexec "$@"\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": str(number),
    }
    command = ["bash", str(tiny.ROOT / "scripts/slurm/predict.sbatch"), *flags, "--output", str(output)]
    return subprocess.Popen(
        command, env=environment, start_new_session=True, text=True, stderr=subprocess.DEVNULL
    )


@pytest.mark.slow
def test_a_task_of_an_array_is_killed_and_started_again(flags, serial, tmp_path):
    output = tmp_path / "out"
    first = array_task(0, flags, output)
    second = array_task(1, flags, output)
    wait_for(1, output)
    os.killpg(second.pid, signal.SIGKILL)
    assert second.wait() == -signal.SIGKILL
    again = array_task(1, flags, output)
    assert (first.wait(), again.wait()) == (0, 0)
    assert_same(output, serial)
    assert not (tmp_path / "asked").exists()


@pytest.mark.slow
def test_a_task_whose_time_is_up_goes_back_into_the_queue(flags, tmp_path):
    output = tmp_path / "out"
    task = array_task(3, [*flags, "--workers", "1"], output)
    wait_for(1, output)
    os.kill(int((tmp_path / "step").read_text()), signal.SIGTERM)  # to the step, as `--signal=TERM` does
    code = task.wait()
    assert code in (75, 0)  # 0 if the last case was done by then
    requeued = (tmp_path / "asked").exists()
    assert requeued == (code == 75)
    assert not requeued or (tmp_path / "asked").read_text() == "requeue 7_3\n"
