"""Error messages of prediction."""

import errno
import os

import pytest

from medconv.inference.predict import failures, unwritable, why_failed


def test_a_full_disk_is_named_with_its_free_space(tmp_path):
    error = unwritable(tmp_path, "a", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert str(error).startswith(f"case a: no room in {tmp_path} (No space left on device), ")
    assert " MB are free. Finished cases are kept; " in str(error)


def test_a_folder_without_permission_is_named(tmp_path):
    error = unwritable(tmp_path, "a", OSError(errno.EACCES, os.strerror(errno.EACCES)))
    assert str(error) == f"case a: cannot write to {tmp_path} (Permission denied)"


def test_failed_cases_are_listed_with_their_reasons():
    text = failures({"a": "damaged", "b": "empty", "c": "damaged"}, 4)
    assert text == "3 of 4 cases could not be predicted\n  cases a, c: damaged\n  case b: empty"
    # the file of a case is its own
    text = failures({case: f"in/{case}.nii.gz: expected 3 channels, found 1" for case in ("a.1", "b")}, 2)
    assert text.splitlines()[1:] == ["  cases a.1, b: in/a.1.nii.gz: expected 3 channels, found 1"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a.nii: damaged"), "a.nii: damaged"),
        (MemoryError("no 9 TiB"), "out of memory (MemoryError: no 9 TiB); try sw_batch_size=1, "),
        (RuntimeError("x: can't allocate memory\nmore"), "out of memory (RuntimeError: x: can't allocate"),
        (TypeError("what?"), "TypeError: what? (a bug in medconv, please report it with the lines above)"),
    ],
)
def test_errors_are_one_line_and_that_of_a_bug_has_a_traceback(error, text, caplog):
    try:
        raise error
    except Exception as raised:
        line = why_failed(raised)
    assert line.startswith(text) and "\n" not in line
    traces = ["test_errors.py" in message for message in caplog.messages]
    assert traces == [True] * isinstance(error, TypeError)
