"""Exported ONNX files: they predict as their checkpoint; damaged files and other formats are refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest
from helpers import exports, tiny
from helpers.exports import Exported

from medconv.inference.exported.load import _providers, load
from medconv.inference.predictor import Predictor


@pytest.fixture
def file(exported: Exported) -> Path:
    return exported.files["onnx"]


def test_a_damaged_file_is_one_error(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    for number, bad in enumerate((b"", b"no model", content[: len(content) // 2])):
        (path := tmp_path / f"m{number}").write_bytes(bad)
        with pytest.raises(ValueError, match=rf"m{number}: damaged") as error:
            load(exports.sealed(file, path))
        assert "\n" not in str(error.value)


def test_an_onnx_file_with_weights_in_other_files_is_refused(file: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(file)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    with pytest.raises(ValueError, match=r"m\.onnx: refused, its weights are in other files"):
        load(exports.sealed(file, tmp_path / "m.onnx"))


def test_an_onnx_function_with_weights_in_other_files_is_refused(file: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model, tensor = onnx.load(file), onnx.TensorProto(dims=[1], data_type=1, data_location=1)
    node = onnx.helper.make_node("Constant", [], ["x"], value=tensor)
    model.functions.append(onnx.helper.make_function("own", "f", [], ["x"], [node], model.opset_import))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"m\.onnx: refused, its weights are in other files"):
        load(exports.sealed(file, tmp_path / "m.onnx"))


def test_an_onnx_session_runs_on_the_chosen_gpu(caplog: pytest.LogCaptureFixture) -> None:
    runtime = SimpleNamespace(
        get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    for device, number in (("cuda", 0), ("cuda:1", 1)):
        assert _providers(runtime, device)[0] == ("CUDAExecutionProvider", {"device_id": number})
    runtime.get_available_providers = lambda: ["CPUExecutionProvider"]
    assert _providers(runtime, "cpu") == ["CPUExecutionProvider"] and not caplog.messages
    assert _providers(runtime, "cuda") == ["CPUExecutionProvider"] and "has no CUDA" in caplog.text


@pytest.mark.parametrize(
    ("format", "name"), [("torchscript", "m.ts"), ("torchscript", "m.pt"), ("pt2", "m.pt2"), ("pt2", "m")]
)
def test_torchscript_and_pt2_files_are_refused(
    exported: Exported, tmp_path: Path, format: str, name: str
) -> None:
    """With their metadata or without."""
    path = Path(shutil.copy(exported.files[format], tmp_path / name))
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            load(path)
        message = str(error.value)
        assert f"{path}: a TorchScript or torch.export file; exported models are read as ONNX only" in message
        assert "medconv export --checkpoint CHECKPOINT --format onnx --output m.onnx" in message
        assert "\n" not in message
        exports.sealed(exported.files[format], path)


def test_a_folder_such_as_a_bundle_is_refused_as_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a folder, such as a MONAI bundle; exported models .* ONNX only"):
        load(tmp_path)


def test_predict_gives_the_same_results_from_an_onnx_file_and_its_checkpoint(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, checkpoint, files = exported
    options = ("--input", images, "--device", "cpu", "--save-probabilities", "--mirror-axes", "1")
    for name, network in (
        ("checkpoint", ("--checkpoint", checkpoint)),
        ("onnx", ("--exported-model", files["onnx"])),
    ):
        assert tiny.call(monkeypatch, "predict", *network, *options, "--output", tmp_path / name) == 0
    for path in sorted((tmp_path / "checkpoint").glob("*.nii.gz")):
        folders = [tmp_path / name for name in ("checkpoint", "onnx")]
        labels = [np.asarray(nib.load(folder / path.name).dataobj) for folder in folders]
        probabilities = [nib.load(folder / "probabilities" / path.name).get_fdata() for folder in folders]
        assert (labels[0] != labels[1]).mean() < 1e-3 and len(np.unique(labels[0])) > 1
        np.testing.assert_allclose(*probabilities, atol=1e-4)
    manifest = json.loads((tmp_path / "onnx/prediction.json").read_text())
    assert manifest["checkpoint"] == str(files["onnx"]) and manifest["settings"]["mirror_axes"] == [[1]]


def test_an_onnx_file_and_a_checkpoint_are_averaged(exported: Exported) -> None:
    image = exported.images / "case_0.nii.gz"
    predictor = Predictor.load([exported.checkpoint], models=[exported.files["onnx"]])
    assert len(predictor.members) == 2 and len(predictor.forward.preprocessings) == 1
    assert (predictor(image) != Predictor.load([exported.checkpoint])(image)).mean() < 1e-3
