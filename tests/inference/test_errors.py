"""Error messages of prediction."""

import errno
import os

import pytest

from medconv.inference.predict import failures, reason, unwritable


def test_a_full_disk_is_named_with_its_free_space(tmp_path):
    error = unwritable(tmp_path, "a", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert str(error).startswith(f"case a: no room in {tmp_path} (No space left on device), ")
    assert " MB are free. Finished cases are kept; " in str(error)


def test_a_folder_without_permission_is_named(tmp_path):
    error = unwritable(tmp_path, "a", OSError(errno.EACCES, os.strerror(errno.EACCES)))
    assert str(error) == f"case a: cannot write to {tmp_path} (Permission denied)"


def test_failed_cases_are_listed_with_their_reasons():
    text = failures({"a": "damaged", "b": "empty"}, 3)
    assert text == "2 of 3 cases could not be predicted\n  case a: damaged\n  case b: empty"
    text = failures({"a": "damaged", "b": "empty", "c": "damaged"}, 3)
    assert text.endswith("predicted\n  cases a, c: damaged\n  case b: empty")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a.nii: damaged"), "a.nii: damaged"),
        (MemoryError("no 9 TiB"), "out of memory (MemoryError: no 9 TiB); try sw_batch_size=1, "),
        (RuntimeError("x: can't allocate memory\nmore"), "out of memory (RuntimeError: x: can't allocate"),
    ],
)
def test_expected_errors_are_one_line_without_a_traceback(error, text, caplog):
    line = reason(error)
    assert line.startswith(text) and "\n" not in line and not caplog.messages


def test_an_unexpected_error_is_a_bug_with_a_traceback(caplog):
    try:
        raise TypeError("what?")
    except TypeError as error:
        line = reason(error)
    assert line == "TypeError: what? (a bug in medconv, please report it with the lines above)"
    assert "Traceback" in caplog.text and "test_errors.py" in caplog.text
