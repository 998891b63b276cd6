"""medconv/exported/archives.py: files of others that would do more than compute are refused before torch reads them."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import exports
import pytest
import torch
from torch import Tensor, nn

from medconv import export, exported
from medconv.exported.loading import _providers

Parts = dict[str, bytes]
GRAPH = "models/model.json"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("archives")
    _, checkpoint = exports.train(folder)
    for format in ("torchscript", "pt2", "onnx"):
        export.export(checkpoint, folder / format, export.Wanted(format))
    return {format: folder / format for format in ("torchscript", "pt2", "onnx")}


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Writes(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        torch.save(image, "hit")
        return image


class Reads(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image + torch.from_file("hit", True, 1)


class Loops(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        while bool((image > -1e9).all()):
            image = image + 1
        return image


class Hides(nn.Module):
    """What it does on loading, not in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    @torch.jit.export
    def __getstate__(self) -> tuple[Tensor, bool]:
        return self.weight, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[Tensor, bool]) -> None:
        torch.save(state[0], "hit")
        self.weight = state[0]
        self.training = state[1]

    def forward(self, image: Tensor) -> Tensor:
        return image


@pytest.mark.parametrize("kind", [Writes, Reads, Loops, Hides])
def test_programs_in_torchscript_are_refused(
    files: dict[str, Path], kind: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.jit.script(kind()).save(tmp_path / "m.ts")
    exports.sealed(files["torchscript"], tmp_path / "m.ts")
    with pytest.raises(ValueError, match=r"m\.ts: refused, it holds "):
        exported.load(tmp_path / "m.ts")
    assert not (tmp_path / "hit").exists()
    if kind is Hides:  # it would have run
        torch.jit.load(tmp_path / "m.ts")
        assert (tmp_path / "hit").exists()


CODE: dict[str, Callable[[str], str]] = {
    "another call": lambda code: code.replace("torch.cat(", "torch.save("),
    "one of its namespace": lambda code: code.replace("torch.cat(", "ops.aten.save("),
    "a function under another name": lambda code: code.replace("  def forward", "  forward = torch.save\n  def forward", 1),
    "a method of a tensor": lambda code: code.replace("torch.cat(", "image.save("),
    "a comment": lambda code: code + "# x\n",
    "an import": lambda code: "import os\n" + code,
    "what is no Python": lambda code: code + "\n)",
    "another function": lambda code: code + "def forwards(x: int) -> int:\n  return x\n",
    "text": lambda code: code.replace("torch.cat(", 'torch.cat("/etc/x", '),
    "a built-in's name": lambda code: code.replace("  def forward", "  torch = 1\n  def forward", 1),
}


@pytest.mark.parametrize("name", CODE)
def test_edited_code_is_refused(files: dict[str, Path], name: str, tmp_path: Path) -> None:
    def edit(parts: Parts) -> None:
        for part in [part for part in parts if part.endswith("unet.py")]:
            text = parts[part].decode()
            assert CODE[name](text) != text
            parts[part] = CODE[name](text).encode()

    with pytest.raises(ValueError, match=r"m: refused, it holds "):
        exported.load(exports.repacked(files["torchscript"], tmp_path / "m", edit))


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Parts], None]:
    def edit(parts: Parts) -> None:
        model = json.loads(parts[GRAPH])
        change(model)
        parts[GRAPH] = json.dumps(model).encode()

    return edit


def nodes(model: dict[str, Any]) -> list[dict[str, Any]]:
    return model["graph_module"]["graph"]["nodes"]


def sizes(model: dict[str, Any], text: str) -> None:
    for meta in model["graph_module"]["graph"]["tensor_values"].values():
        for size in meta["sizes"]:
            if "as_expr" in size:
                size["as_expr"]["expr_str"] = text


PT2: dict[str, Callable[[Parts], Any]] = {
    "a library": lambda parts: parts.update({"data/aotinductor/model/x.so": b""}),
    "a pickle of weights": lambda parts: parts.update(
        {
            "data/weights/model_weights_config.json": parts["data/weights/model_weights_config.json"].replace(
                b"false", b"true"
            )
        }
    ),
    "an object": lambda parts: parts.update({"data/constants/custom_obj_0": b""}),
    "a size that is code": edited(lambda model: sizes(model, "__import__('os').mkdir('hit')")),
    "a size without end": edited(lambda model: sizes(model, "9**9**9**9")),
    "another call": edited(lambda model: nodes(model)[0].update(target="torch.os.system")),
    "an operation that writes": edited(lambda model: nodes(model)[0].update(target="torch.ops.aten.save.default")),
    "a name that is code": edited(lambda model: nodes(model)[0].update(name="x; import os")),
    "a container that imports": edited(
        lambda model: model["graph_module"]["module_call_graph"][0]["signature"].update(
            in_spec='[1, {"type": "collections.defaultdict", "context": "{}", "children_spec": []}]'
        )
    ),
}


@pytest.mark.parametrize("name", PT2)
def test_edited_graphs_are_refused(
    files: dict[str, Path], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"m: refused, it holds "):
        exported.load(exports.repacked(files["pt2"], tmp_path / "m", PT2[name]))
    assert not (tmp_path / "hit").exists()


def test_what_torch_would_run_is_left_out(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Example inputs are unpickled by torch, lines of guards are run; the rest of the file is whole."""
    monkeypatch.chdir(tmp_path)

    def edit(parts: Parts) -> None:
        parts["data/sample_inputs/model.pt"] = pickle.dumps(Payload(tmp_path / "hit"))
        edited(lambda model: model.update(guards_code=["__import__('os').mkdir('hit')"]))(parts)

    path = exports.repacked(files["pt2"], tmp_path / "m.pt2", edit)
    model = exported.load(path)
    model.network(torch.zeros(1, 1, *model.window.patch_size))
    assert not (tmp_path / "hit").exists()
    with pytest.raises(Exception):  # noqa: B017
        torch.export.load(path).module()
    assert (tmp_path / "hit").exists()  # it would have run


@pytest.mark.parametrize("format", ["torchscript", "pt2", "onnx"])
def test_damaged_files(files: dict[str, Path], format: str, tmp_path: Path) -> None:
    content = files[format].read_bytes()
    for number, bad in enumerate((b"", b"no model", content[: len(content) // 2])):
        (path := tmp_path / f"m{number}").write_bytes(bad)
        with pytest.raises(ValueError, match=rf"m{number}: (damaged|refused)") as error:
            exported.load(exports.sealed(files[format], path))
        assert "\n" not in str(error.value)


def test_an_onnx_file_refers_to_no_other(files: dict[str, Path], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(files["onnx"])
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    with pytest.raises(ValueError, match=r"m\.onnx: refused, it holds a reference to other files"):
        exported.load(exports.sealed(files["onnx"], tmp_path / "m.onnx"))


def test_an_onnx_function_refers_to_no_other(files: dict[str, Path], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model, tensor = onnx.load(files["onnx"]), onnx.TensorProto(dims=[1], data_type=1, data_location=1)
    node = onnx.helper.make_node("Constant", [], ["x"], value=tensor)
    model.functions.append(onnx.helper.make_function("own", "f", [], ["x"], [node], model.opset_import))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"m\.onnx: refused, it holds a reference to other files"):
        exported.load(exports.sealed(files["onnx"], tmp_path / "m.onnx"))


def test_an_onnx_session_is_on_the_gpu_that_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    runtime = SimpleNamespace(get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    for device, number in (("cuda", 0), ("cuda:1", 1)):
        assert _providers(runtime, device)[0] == ("CUDAExecutionProvider", {"device_id": number})
    runtime.get_available_providers = lambda: ["CPUExecutionProvider"]
    assert _providers(runtime, "cpu") == ["CPUExecutionProvider"] and not caplog.messages
    assert _providers(runtime, "cuda") == ["CPUExecutionProvider"] and "has no CUDA" in caplog.text
