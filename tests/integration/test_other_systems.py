"""Prediction, evaluation and the layers without what only Linux has: what macOS and Windows lack is taken away.

This stands in for these systems, on which the same tests run in `.github/workflows/platforms.yml`.
"""

import json
import os
import subprocess
import sys

import pytest
from helpers import tiny
from helpers.waiting import PATIENCE_S

# Third-party packages choose their way by the system's name, which stays; they are imported first.
WITHOUT_LINUX = """
import json, os, signal, sys
import torch, lightning, monai.inferers, nibabel, filelock, matplotlib.figure, hydra, scipy.ndimage
for module, names in {
    os: ["sched_getaffinity", "sysconf", "statvfs", "getuid", "fork", "link"],
    signal: ["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGKILL", "pthread_sigmask"],
}.items():
    for name in names:
        delattr(module, name)
for name in ("fcntl", "resource", "pwd", "grp"):
    sys.modules[name] = None
from medconv.cli.main import main
import medconv.convs
for words in json.loads(sys.argv[1]):
    sys.argv = ["medconv", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


def run(*commands):
    """Commands of `medconv`, one after the other in one process."""
    command = [sys.executable, "-c", WITHOUT_LINUX, json.dumps(commands)]
    environment = {**os.environ, "PYTHONPATH": str(tiny.ROOT)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.mark.slow
def test_prediction_and_evaluation_need_nothing_that_only_linux_has(exported, dataset, tmp_path):
    output, scores = tmp_path / "predictions", tmp_path / "metrics.json"
    predict = ["predict", "--checkpoint", str(exported.checkpoint), "--input", str(dataset / "imagesTr")]
    evaluate = ["evaluate", "--predictions", str(output), "--references", str(dataset / "labelsTr")]
    done = run([*predict, "--output", str(output)], [*evaluate, "--output", str(scores)])
    assert done.returncode == 0, done.stderr
    assert len(list(output.glob("*.nii.gz"))) == len(list((dataset / "imagesTr").glob("*.nii.gz")))
    assert "mean foreground" in done.stdout
    assert scores.is_file()
