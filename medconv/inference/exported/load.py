"""Load exported ONNX models.

The other formats of `export` are not read: TorchScript and torch.export files are programs, and PyTorch has
no safe way to load them.
"""

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medconv.inference.exported import metadata as exported_metadata
from medconv.inference.load import LoadedModel
from medconv.utils.errors import with_class

INPUT, OUTPUT = "image", "logits"  # their names in an ONNX file
_TORCH = (".pt", ".pth", ".ts", ".pt2")
_ZIP = b"PK\x03\x04"  # the first bytes of torch's files
log = logging.getLogger(__name__)


def load(path: Path, device: str = "cpu", mirror_axes: Sequence[int] | None = None) -> LoadedModel:
    """Load an exported ONNX model with its metadata.

    Args: mirror_axes: spatial axes of test-time augmentation; None: those of the metadata.
    Raises: ValueError: the model or its metadata is missing, damaged, of another file or not ONNX; a
        package is missing.
    """
    _need_onnx(path)
    metadata = exported_metadata.read(path)
    if metadata.get("format") != "onnx":
        raise ValueError(
            f"{exported_metadata.metadata_path(path)}: its format must be onnx, got "
            f"{metadata.get('format')!r:.40}"
        )
    return exported_metadata.as_loaded_model(metadata, read_onnx(path, device), path, mirror_axes)


def _need_onnx(path: Path) -> None:
    """Raises: ValueError: a TorchScript or torch.export file, by its name or its first bytes; a bundle."""
    if not path.exists():
        return
    kind = "folder, such as a MONAI bundle"
    if not path.is_dir():
        with path.open("rb") as file:
            first_bytes = file.read(len(_ZIP))
        if path.suffix not in _TORCH and first_bytes != _ZIP:
            return
        kind = "TorchScript or torch.export file"
    command = (
        f"medconv export --checkpoint CHECKPOINT --format onnx --output {path.with_suffix('.onnx').name}"
    )
    raise ValueError(f"{path}: a {kind}; exported models are read as ONNX only: {command}")


def need(packages: Sequence[str], purpose: str) -> list[Any]:
    """Import packages of the extra `onnx`. Raises: ValueError: one is missing."""
    try:
        return [import_module(name) for name in packages]
    except ImportError as error:
        raise ValueError(f"{purpose} needs {error.name}: pip install 'medconv[onnx]'") from error


def _attempt(path: Path, read: Callable[[], Any]) -> Any:
    try:
        with quiet():
            return read()
    except Exception as error:  # torch, protobuf and the runtime have no common class for damaged files
        raise ValueError(f"{path}: damaged, or of another version ({with_class(error)})") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's deprecation warnings and progress output."""
    before = logging.root.manager.disable
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.ERROR)
            # Some of it is printed, graphs too.
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                yield
    finally:
        logging.disable(before)


def read_onnx(path: Path, device: str) -> nn.Module:
    """Raises: ValueError: it is damaged, or refers to other files; a package is missing."""
    onnx, runtime = need(("onnx", "onnxruntime"), f"{path}: an ONNX file")
    content = path.read_bytes()
    model = _attempt(path, lambda: onnx.load_model_from_string(content))
    if any(
        tensor.data_location == onnx.TensorProto.EXTERNAL
        for part in (model.graph, *model.functions)
        for tensor in _tensors(part)
    ):
        raise ValueError(
            f"{path}: refused, its weights are in other files; medconv export writes a single file"
        )
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = torch.get_num_threads(), 3
    providers = _providers(runtime, device)
    return OnnxNetwork(
        _attempt(path, lambda: runtime.InferenceSession(content, settings, providers=providers))
    )


def _providers(runtime: Any, device: str) -> list[Any]:
    if not device.startswith("cuda"):
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in runtime.get_available_providers():
        log.warning("this onnxruntime has no CUDA (pip install onnxruntime-gpu); ONNX models run on the CPU")
        return ["CPUExecutionProvider"]
    return [("CUDAExecutionProvider", {"device_id": torch.device(device).index or 0}), "CPUExecutionProvider"]


def _tensors(graph: Any) -> list[Any]:
    """All constants of a graph or a function, and of the graphs inside it."""
    dense, sparse = list(getattr(graph, "initializer", ())), list(getattr(graph, "sparse_initializer", ()))
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        dense += [attribute.t, *attribute.tensors]
        sparse += [attribute.sparse_tensor, *attribute.sparse_tensors]
        for inner in [attribute.g, *attribute.graphs]:
            dense += _tensors(inner) if inner.ByteSize() else []
    return dense + [part for tensor in sparse for part in (tensor.values, tensor.indices)]


class OnnxNetwork(nn.Module):
    """A session of the ONNX runtime as a module. It has its own threads, and no gradients.

    Shape: (batch, channels, *spatial) -> (batch, outputs, *spatial) float32, on the device of the input.
    """

    def __init__(self, session: Any) -> None:
        super().__init__()
        self.session = session

    def forward(self, image: Tensor) -> Tensor:
        array = image.detach().float().cpu().contiguous().numpy()
        (logits,) = self.session.run([OUTPUT], {INPUT: array})
        return torch.from_numpy(logits).to(image.device)
