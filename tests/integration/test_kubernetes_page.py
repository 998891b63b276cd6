"""docs/kubernetes.md: processes with the variables of its Job find each other, as far as variables tell."""

import os
import re
import subprocess

import pytest
import yaml
from helpers import tiny
from helpers.launchers import launch

from medconv.utils.cluster import JOB, Launcher, is_first, launcher

PAGE = (tiny.ROOT / "docs/kubernetes.md").read_text()


@pytest.fixture(scope="module")
def job():
    [block] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    service, job = yaml.safe_load_all(block)
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    return job


def variables(job, index):
    """Those of a pod: the page's, and the number that Kubernetes gives it."""
    [container] = job["spec"]["template"]["spec"]["containers"]
    return {
        **{entry["name"]: entry["value"] for entry in container["env"]},
        "JOB_COMPLETION_INDEX": str(index),
    }


@pytest.mark.parametrize("index", [0, 1])
def test_the_command_of_a_pod_has_its_rank(job, tmp_path, index):
    [container] = job["spec"]["template"]["spec"]["containers"]
    (tmp_path / "medconv").write_text("#!/bin/sh\necho $RANK $WORLD_SIZE $MASTER_ADDR $1\n")
    (tmp_path / "medconv").chmod(0o755)
    environment = {**variables(job, index), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [*container["command"], *container["args"]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{index} {job['spec']['completions']} train-0.train train\n"


def test_the_pods_are_machines_of_one_run(job, monkeypatch):
    for index in (0, 1):
        launch(monkeypatch, **variables(job, index), RANK=index)
        assert launcher() == Launcher(JOB, nodes=2, devices=1)
        assert is_first() == (index == 0)
