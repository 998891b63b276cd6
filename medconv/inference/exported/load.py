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

# Names of input and output in an ONNX file.
INPUT = "image"
OUTPUT = "logits"
_TORCH = (".pt", ".pth", ".ts", ".pt2")
# The first bytes of torch's files.
_ZIP = b"PK\x03\x04"
log = logging.getLogger(__name__)


def load(
    path: Path,
    device: str = "cpu",
    mirror_axes: Sequence[int] | None = None,
) -> LoadedModel:
    """Load an exported ONNX model with its metadata.

    Args:
        path: the model; its metadata is in `PATH.json`.
        device: where it runs, as torch names it.
        mirror_axes: spatial axes of test-time augmentation; None: those of the metadata.
    Raises:
        ValueError: the model or its metadata is missing, damaged, of another file or not ONNX; a package is
            missing.
    """
    _check_is_onnx(path)
    metadata = exported_metadata.read(path)
    if metadata.get("format") != "onnx":
        raise ValueError(
            f"{exported_metadata.metadata_path(path)}: its format must be onnx, got "
            f"{metadata.get('format')!r:.40}"
        )
    network = read_onnx(path, device)
    return exported_metadata.as_loaded_model(metadata, network, path, mirror_axes)


def _check_is_onnx(path: Path) -> None:
    """Raises: ValueError: a TorchScript or torch.export file, by its name or its first bytes; a bundle."""
    if not path.exists():
        return
    if path.is_dir():
        kind = "folder, such as a MONAI bundle"
    elif path.suffix in _TORCH or _first_bytes(path) == _ZIP:
        kind = "TorchScript or torch.export file"
    else:
        return
    command = (
        f"medconv export --checkpoint CHECKPOINT --format onnx --output {path.with_suffix('.onnx').name}"
    )
    raise ValueError(f"{path}: a {kind}; exported models are read as ONNX only: {command}")


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_ZIP))


def need(packages: Sequence[str], purpose: str) -> list[Any]:
    """Import packages of the extra `onnx`.

    Args:
        purpose: what needs them, for the message.
    Raises:
        ValueError: one is missing.
    """
    try:
        return [import_module(name) for name in packages]
    except ImportError as error:
        raise ValueError(f"{purpose} needs {error.name}: pip install 'medconv[onnx]'") from error


def _attempt(path: Path, read: Callable[[], Any]) -> Any:
    try:
        with quiet():
            return read()
    # torch, protobuf and the runtime have no common class for damaged files.
    except Exception as error:
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
    """The network of an ONNX file.

    Args:
        device: where it runs, as torch names it; the CPU if this onnxruntime has no CUDA.
    Raises:
        ValueError: it is damaged, or refers to other files; a package is missing.
    """
    onnx, runtime = need(("onnx", "onnxruntime"), f"{path}: an ONNX file")
    content = path.read_bytes()
    model = _attempt(path, lambda: onnx.load_model_from_string(content))
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in _all_tensors(model)):
        raise ValueError(
            f"{path}: refused, its weights are in other files; medconv export writes a single file"
        )
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    # Errors alone.
    settings.log_severity_level = 3
    providers = _providers(runtime, device)
    session = _attempt(path, lambda: runtime.InferenceSession(content, settings, providers=providers))
    return OnnxNetwork(session)


def _providers(runtime: Any, device: str) -> list[Any]:
    if not device.startswith("cuda"):
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in runtime.get_available_providers():
        log.warning("this onnxruntime has no CUDA (pip install onnxruntime-gpu); ONNX models run on the CPU")
        return ["CPUExecutionProvider"]
    gpu = {"device_id": torch.device(device).index or 0}
    return [("CUDAExecutionProvider", gpu), "CPUExecutionProvider"]


def _all_tensors(model: Any) -> Iterator[Any]:
    """All constants of an ONNX model, which may lie in other files."""
    yield from _tensors(model.graph)
    for function in model.functions:
        yield from _tensors(function)


def _tensors(graph: Any) -> Iterator[Any]:
    """All constants of a graph or a function, and of the graphs inside it."""
    dense = list(getattr(graph, "initializer", ()))
    sparse = list(getattr(graph, "sparse_initializer", ()))
    for node in graph.node:
        for attribute in node.attribute:
            dense += [attribute.t, *attribute.tensors]
            sparse += [attribute.sparse_tensor, *attribute.sparse_tensors]
            for subgraph in (attribute.g, *attribute.graphs):
                # Else the attribute is not a graph.
                if subgraph.ByteSize():
                    yield from _tensors(subgraph)
    yield from dense
    for tensor in sparse:
        yield tensor.values
        yield tensor.indices


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
