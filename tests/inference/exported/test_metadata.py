"""The metadata file of an exported model, as it is read: what does not fit the model is refused."""

import shutil
from pathlib import Path

import pytest
from helpers import exports
from helpers.exports import Exported

from medconv.inference.exported.load import load
from medconv.inference.exported.metadata import metadata_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "the metadata of another file"),
        ({"medconv_metadata": 2}, "metadata of version 2"),
        ({"format": "os.system"}, "its format must be onnx, got 'os.system'"),
        ({"inputs": {}}, "damaged, it cannot be read (KeyError: "),
        ({"windows": []}, "damaged, it cannot be read"),
        ({"outputs": {"class_names": ["a"], "targets": {"names": 3}}}, "damaged, it cannot be read"),
        (None, "its metadata file m.onnx.json is not beside it"),
        ("{", "damaged, or not the metadata of an exported model"),
        ("[]", "damaged, or not the metadata of an exported model"),
    ],
)
def test_metadata_that_is_missing_damaged_or_of_another_file_is_refused(
    exported: Exported, tmp_path: Path, changes, message: str
) -> None:
    path = Path(shutil.copy(exported.files["onnx"], tmp_path / "m.onnx"))
    if isinstance(changes, str):
        metadata_path(path).write_text(changes)
    elif changes is not None:
        exports.sealed(exported.files["onnx"], path, **changes)
    with pytest.raises(ValueError) as error:
        load(path)
    assert message in str(error.value) and "\n" not in str(error.value)
