"""Exported files: their logits, their operations, and the packages that writing them needs."""

import sys
from collections import Counter

import pytest
import torch
from helpers import exports
from helpers.exports import refusal
from torch import nn

from medconv.convs import fold_convs
from medconv.features.export.formats import write_network
from medconv.features.export.graph import Captured, Logits
from medconv.inference.load import load


@pytest.mark.parametrize("format", exports.FORMATS)
def test_a_file_gives_the_logits_of_the_checkpoint_for_any_batch_and_size(exported, format):
    model, written = load(exported.checkpoint), exports.read_back(exported.files[format], format)
    for batch, size in ((1, (16, 16, 12)), (3, model.window.patch_size), (2, (8, 20, 4))):
        image = torch.randn(batch, 1, *size, generator=torch.Generator().manual_seed(batch))
        with torch.inference_mode():
            expected, logits = model.network(image), written.network(image)
        assert logits.shape == expected.shape == (batch, 3, *size) and expected.std() > 0.01
        assert (logits - expected).abs().max() <= 1e-4


def test_files_hold_only_plain_convolutions(exported):
    network = load(exported.checkpoint, plain=True).network
    layers = Counter(
        type(layer).__name__
        for layer in network.modules()
        if "Conv" in type(layer).__name__ and not list(layer.children())
    )
    convs, transposed = layers["Conv3d"], layers["ConvTranspose3d"]
    assert convs == 8 and transposed == 1
    graph = torch.jit.load(exported.files["torchscript"]).inlined_graph
    kinds = (node.kind() for node in graph.nodes())
    operations = Counter(kind.removeprefix("aten::") for kind in kinds if kind.startswith("aten::"))
    assert set(operations) == {"_convolution", "instance_norm", "leaky_relu_", "cat"}
    assert operations["_convolution"] == convs + transposed
    nodes = torch.export.load(exported.files["pt2"].open("rb")).graph.nodes
    calls = (str(node.target) for node in nodes if node.op == "call_function")
    operations = Counter(name for name in calls if "sym_size" not in name)
    assert operations["aten.conv3d.default"] == convs
    assert operations["aten.conv_transpose3d.input"] == transposed
    assert set(operations) <= {
        *("aten.conv3d.default", "aten.conv_transpose3d.input", "aten.instance_norm.default"),
        *("aten.leaky_relu_.default", "aten.cat.default"),
    }
    onnx = pytest.importorskip("onnx")
    operations = Counter(node.op_type for node in onnx.load(exported.files["onnx"]).graph.node)
    assert operations["Conv"] == convs and operations["ConvTranspose"] == transposed
    assert not {"MatMul", "Einsum", "Gemm"} & set(operations)
    fast = load(exported.checkpoint).network  # its fast norms must not be in a file
    assert type(fast.encoder[0][1]).__name__ == "ChannelsLastInstanceNorm3d"
    assert fold_convs(network) is not network


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named_before_anything_is_read(tmp_path, monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    arguments = ("--checkpoint", "nowhere.ckpt", "--format", "onnx", "--output", tmp_path / "m.onnx")
    error = refusal(monkeypatch, capsys, "export", *arguments)
    assert f"needs {package}: pip install 'medconv[onnx]'" in error
    assert not list(tmp_path.iterdir())


class Counts(nn.Module):
    """Its trace holds a number of the example's, as that of attention windows does."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.reshape(image.shape[0], 1, int(image.shape[2]), -1) + 1


def test_a_trace_that_holds_the_size_of_the_patch_takes_no_other(tmp_path, caplog):
    caplog.set_level("INFO")
    for network, dynamic in ((Counts(), False), (nn.Conv2d(1, 1, 1), True)):
        captured = Captured(Logits(network), None, torch.zeros(2, 1, 8, 8), (1, 1), (True, True))
        written = write_network(captured, "torchscript", tmp_path / "m.pt", 18)
        assert written.dynamic == (dynamic,) * 2
    assert caplog.messages.count("as torchscript, the network takes images of the patch's size alone") == 1
