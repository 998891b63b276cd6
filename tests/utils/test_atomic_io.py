"""medconv/utils/atomic_io.py: a reader sees the old file or the new one, never a part."""

import pytest

from medconv.utils.atomic_io import replacing, write_text


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
