"""scripts/benchmark.py: the command that runs a benchmark by its name."""

import sys

import pytest

from benchmark import main


def test_an_unknown_benchmark_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "lunch"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1 and "lunch" in capsys.readouterr().err
