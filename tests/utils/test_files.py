"""medconv/utils/: files written at once, their digests, and cells of CSV files."""

import csv
import hashlib
import io

import pytest

from medconv.utils.atomic_io import replacing, write_text
from medconv.utils.csv_cells import csv_text, original
from medconv.utils.digests import digest


def test_a_new_file_replaces_the_old_one(tmp_path):
    path = tmp_path / "Größe 1.nii.gz"
    for content in ("old", "new é"):
        write_text(path, content)
        assert path.read_text(encoding="utf-8") == content
    with replacing(path, durable=True) as partial:
        assert (
            partial.parent == path.parent
            and partial.name.startswith(".")
            and partial.name.endswith(".nii.gz")
        )
        partial.write_text("half")
        assert path.read_text(encoding="utf-8") == "new é"
    assert path.read_text() == "half"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_write_keeps_the_old_file(tmp_path, error):
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(error), replacing(path) as partial:
        partial.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_digest_is_the_sha256_of_the_content(tmp_path):
    content = b"abc" * 100_000
    path = tmp_path / "file"
    path.write_bytes(content)
    assert digest(path) == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("text", ["=1+1", "+case", "-case", "@SUM(A1)", "\tx", "'=1", "''-x", "-1-2"])
def test_a_formula_gets_an_apostrophe_and_is_read_back(text):
    ((cell,),) = csv.reader(io.StringIO(csv_text([[text]])))
    assert cell == f"'{text}"
    assert original(cell) == text


@pytest.mark.parametrize("text", ["case_1", "'quoted'", "O'Neill", "a=b", "-0.5", "+1e-3", "", "-inf"])
def test_other_cells_stay(text):
    ((cell, second),) = csv.reader(io.StringIO(csv_text([[text, "b"]])))
    assert (cell, second) == (text, "b")
    assert original(cell) == text


def test_numbers_and_missing_values_stay():
    assert csv_text([[-1.5, None, 3], ["a,b", '"', -2]]) == '-1.5,,3\n"a,b","""",-2\n'
