"""medconv/utils/errors.py: errors of libraries in one line."""

import pytest

from medconv.utils.errors import explained


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
