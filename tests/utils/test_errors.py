"""medconv/utils/: errors in one line, exit codes, and packages that are missing."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest
from helpers import tiny

from medconv.utils.errors import explained
from medconv.utils.exit_codes import BUG, DONE, INTERRUPTED, PREEMPTED, USER
from medconv.utils.optional_imports import needed
from medconv.utils.signals import PREEMPTING


def test_an_error_becomes_one_line_with_its_reason(tmp_path):
    with (
        pytest.raises(ValueError, match=r"^a\.nii: damaged \(two lines\)$") as raised,
        explained("a.nii: damaged"),
    ):
        raise RuntimeError("two\n  lines")
    assert isinstance(raised.value.__cause__, RuntimeError)
    with (
        pytest.raises(ValueError, match=r"^cannot be read \(No such file or directory\)$"),
        explained("cannot be read", OSError),
    ):
        (tmp_path / "absent").read_text()
    with pytest.raises(ValueError, match=r"^damaged \(MemoryError\)$"), explained("damaged"):
        raise MemoryError


def test_other_errors_pass():
    with pytest.raises(KeyError), explained("damaged", OSError, ValueError):
        raise KeyError("x")


def test_the_readme_names_the_exit_codes():
    paragraph = (tiny.ROOT / "README.md").read_text().partition("Exit codes: ")[2].partition("\n\n")[0]
    codes = [int(code) for code in re.findall(r"(?:^|;\s)(\d+) ", paragraph)]
    assert codes == [DONE, USER, BUG, PREEMPTED, INTERRUPTED]


def test_the_batch_script_requeues_a_preempted_run():
    script = (tiny.ROOT / "scripts/slurm/train.sbatch").read_text()
    aborted = 128 + signal.SIGABRT  # by NCCL's watchdog
    assert re.findall(r'"\$code" -eq (\d+)', script) == [str(aborted), str(PREEMPTED)]
    assert f"code={PREEMPTED}" in script
    signalled = " | ".join(str(128 + number) for number in sorted(PREEMPTING))
    assert f'case "$code" in {signalled}) code={PREEMPTED} ;; esac' in script


def test_an_installed_package_is_imported():
    assert needed("json", "nrrd", "reading NRRD", Path("a.nrrd")) is json


def test_a_missing_package_is_an_error_that_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "nrrd", None)
    with pytest.raises(ValueError) as error:
        needed("nrrd", "nrrd", "reading NRRD", Path("a.nrrd"))
    assert str(error.value) == "a.nrrd: reading NRRD needs the package nrrd: pip install 'medconv[nrrd]'"
    assert isinstance(error.value.__cause__, ImportError)
