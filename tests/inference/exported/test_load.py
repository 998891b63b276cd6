"""medconv/inference/exported/load.py: ONNX files that are damaged or refer to other files, and the device
they run on.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import exports

from medconv.inference.exported.load import _providers, load


@pytest.fixture
def file(exported: exports.Exported) -> Path:
    return exported.files["onnx"]


def test_damaged_files(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    for number, bad in enumerate((b"", b"no model", content[: len(content) // 2])):
        (path := tmp_path / f"m{number}").write_bytes(bad)
        with pytest.raises(ValueError, match=rf"m{number}: damaged") as error:
            load(exports.sealed(file, path))
        assert "\n" not in str(error.value)


def test_an_onnx_file_refers_to_no_other(file: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(file)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    with pytest.raises(ValueError, match=r"m\.onnx: refused, its weights are in other files"):
        load(exports.sealed(file, tmp_path / "m.onnx"))


def test_an_onnx_function_refers_to_no_other(file: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model, tensor = onnx.load(file), onnx.TensorProto(dims=[1], data_type=1, data_location=1)
    node = onnx.helper.make_node("Constant", [], ["x"], value=tensor)
    model.functions.append(onnx.helper.make_function("own", "f", [], ["x"], [node], model.opset_import))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"m\.onnx: refused, its weights are in other files"):
        load(exports.sealed(file, tmp_path / "m.onnx"))


def test_an_onnx_session_is_on_the_gpu_that_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    runtime = SimpleNamespace(
        get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    for device, number in (("cuda", 0), ("cuda:1", 1)):
        assert _providers(runtime, device)[0] == ("CUDAExecutionProvider", {"device_id": number})
    runtime.get_available_providers = lambda: ["CPUExecutionProvider"]
    assert _providers(runtime, "cpu") == ["CPUExecutionProvider"] and not caplog.messages
    assert _providers(runtime, "cuda") == ["CPUExecutionProvider"] and "has no CUDA" in caplog.text
