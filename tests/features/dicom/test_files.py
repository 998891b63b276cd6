"""medconv/features/dicom/files.py: which files and folders are DICOM; `test_dicom.py` tests choices."""

import pytest

from medconv.data.io.images import read_array
from medconv.features.dicom.files import is_dicom


def test_a_folder_of_other_files_is_not_dicom(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert not is_dicom(tmp_path)
    with pytest.raises(ValueError, match=r"a folder without a DICOM file, expected an image or a series"):
        read_array(tmp_path)
