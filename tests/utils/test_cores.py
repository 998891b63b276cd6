import os

import pytest

from medconv.utils.cores import num_cores


def test_cores_are_those_of_the_process_or_else_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert num_cores() == os.cpu_count()
