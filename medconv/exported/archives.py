"""What a TorchScript or a torch.export file may hold: both are programs, and may do more than compute.

PyTorch has no safe way to load either: TorchScript reads and writes files, `torch.export.load` unpickles, evaluates text and
loads libraries. So the archive is read here, each part is held against a list of what a network needs, and torch gets
a new archive of exactly these parts. What is refused is more than what is harmful.
"""

from __future__ import annotations

import ast
import io
import json
import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medconv.exported.operations import COMPUTES, PLAIN_ARITHMETIC

Parts = dict[str, bytes]  # of an archive, by their names below its top folder

_PLUMBING = r"(\.data/)?version|byteorder|\.data/serialization_id|\.format_version|\.storage_alignment"
_TORCHSCRIPT = re.compile(
    rf"{_PLUMBING}|data\.pkl|constants\.pkl|(data|constants)/\d+|traced_inputs(\.pkl|/\d+)|code/__torch__[\w./]*\.py(\.debug_pkl)?"
)
_EXPORT = re.compile(
    rf"{_PLUMBING}|archive_format|archive_version|models/model\.json|data/sample_inputs/model\.pt|data/weights/weight_\d+"
    r"|data/weights/model_weights_config\.json|data/constants/tensor_\d+|data/constants/model_constants_config\.json"
)
_GLOBAL = re.compile(  # what the pickles of a TorchScript file name: its own classes, and how tensors are put together
    r"__torch__(?!\.torch\.classes)[\w.]* \w+|torch\._utils _rebuild_(tensor_v2|parameter)|collections OrderedDict"
    r"|torch\.jit\._pickle \w+|torch \w+Storage|torch (device|Size)"
)
_TEXT = re.compile(r"[\w.:+-]*")  # names and numbers: nothing that a generated line of code could be left by
_SIZE = re.compile(  # sums, products and quotients of sizes, as sympy spells them
    r"(?:Symbol\('[su]\d+'(?:, (?:positive|nonnegative|integer)=True)*\)|Integer\(-?\d+\)"
    r"|(?<!\w)(?:Add|Mul|FloorDiv|Mod|PythonMod|CeilToInt|Max|Min|Eq|Ne|Equality|Unequality)\(|\)|, )+"
)
_RANGE = re.compile(r"[\w*+/() -]*")  # the same in plain, where it is a name only
_CONTAINERS = {None, "builtins.tuple", "builtins.list", "builtins.dict"}


def torchscript(path: Path) -> io.BytesIO:
    """What of a TorchScript file torch may load. Raises: ValueError: anything else is in it."""
    parts = _parts(path, _TORCHSCRIPT)
    for name, content in parts.items():
        if name.endswith(".py"):
            _check_code(content, path)
        elif name in ("data.pkl", "constants.pkl"):
            _check_pickle(content, path)
    needless = re.compile(r".*\.debug_pkl|traced_inputs.*")
    return _packed({name: content for name, content in parts.items() if not needless.fullmatch(name)})


def export(path: Path) -> io.BytesIO:
    """What of a torch.export file torch may load. Raises: ValueError: anything else is in it."""
    parts = _parts(path, _EXPORT)
    for kind in ("weights", "constants"):
        _check_payload(_json(parts, f"data/{kind}/model_{kind}_config.json", path), path)
    if parts.get("data/sample_inputs/model.pt"):
        parts["data/sample_inputs/model.pt"] = b""  # pickled, and not needed
    model = _json(parts, "models/model.json", path)
    model["guards_code"] = []  # lines of Python
    model["graph_module"]["metadata"] = {}
    _check_graph(model, path)
    parts["models/model.json"] = json.dumps(model).encode()
    return _packed(parts)


def _parts(path: Path, known: re.Pattern[str]) -> Parts:
    try:
        with zipfile.ZipFile(path) as archive:
            found = [(info.filename.partition("/")[2], archive.read(info)) for info in archive.infolist()]
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path}: damaged, or no archive of torch's ({error})") from error
    parts = dict(found)
    strange = [name for name in parts if not known.fullmatch(name)]
    if strange or len(parts) < len(found):
        raise refused(path, f"a part called {strange[0]!r}" if strange else "two parts of one name")
    return parts


def _packed(parts: Parts) -> io.BytesIO:
    """Written anew, so that what torch reads is what was looked at."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in parts.items():
            archive.writestr(f"model/{name}", content)
    file.seek(0)
    return file


def _check_code(content: bytes, path: Path) -> None:
    """TorchScript is a part of Python's grammar; that of a traced network is a smaller one, without branches and loops."""
    text = content.decode("ascii", "replace")
    if re.search(r"[\\#\ufffd]|'''|\"\"\"|classes", text):
        raise refused(path, "code with comments, escapes, foreign classes or letters that are not ASCII")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise refused(path, "code that cannot be read") from error
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if fault := _code_fault(node, called):
            raise refused(path, fault)


def _code_fault(node: ast.AST, called: set[int]) -> str | None:
    if not isinstance(node, _GRAMMAR):
        return f"code with {type(node).__name__}"
    if isinstance(node, ast.FunctionDef) and not re.fullmatch(r"forward\d*", node.name):
        return f"a function called {node.name}"
    if isinstance(node, ast.Call):
        return None if _computes(ast.unparse(node.func)) else f"a call of {ast.unparse(node.func)}"
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in _BUILT_IN:
        return f"a variable called {node.id}"
    if isinstance(node, ast.Attribute) and id(node) not in called and re.match(r"(torch|ops)\.", ast.unparse(node)):
        inner = re.fullmatch(r"ops\.(prim|aten)", ast.unparse(node))  # the left of a call
        return None if inner else f"{ast.unparse(node)}, which is not called"
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.fullmatch(r"[\w .,:-]*", node.value):
        return f"the text {node.value!r:.40}"
    return None


def _computes(function: str) -> bool:
    if function in (*_BUILT_IN[2:], "torch.device", "ops.prim.NumToTensor"):
        return True
    operation = re.fullmatch(r"(?:torch|ops\.aten)\.(\w+)", function)
    if operation:
        return operation[1].removesuffix("_") in COMPUTES
    return bool(re.fullmatch(r"(?!(?:torch|ops)\.)\w[\w.]*\.forward\d*", function))


def _check_pickle(content: bytes, path: Path) -> None:
    try:
        operations = list(pickletools.genops(content))
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error})") from error
    for operation, argument, _ in operations:
        if operation.name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"):
            raise refused(path, f"a pickle with {operation.name}")
        if operation.name == "GLOBAL" and not _GLOBAL.fullmatch(str(argument)):
            raise refused(path, f"{str(argument).replace(' ', '.')!r:.60}")


def _check_payload(config: Any, path: Path) -> None:
    entries = config.get("config") if isinstance(config, dict) else None
    for entry in entries.values() if isinstance(entries, dict) else [None]:
        if not isinstance(entry, dict) or entry.get("use_pickle") is not False:
            raise refused(path, "tensors that are pickled")
        if not re.fullmatch(r"(weight|tensor)_\d+", str(entry.get("path_name"))):
            raise refused(path, f"a tensor called {entry.get('path_name')!r:.40}")


def _check_graph(value: Any, path: Path, key: str = "") -> None:
    """Every text in it, names of keys among them, since torch makes Python of the graph."""
    if isinstance(value, dict):
        if isinstance(value.get("metadata"), dict):
            value["metadata"] = {}  # where in whose Python each node came from
        if "target" in value and "inputs" in value and not _operates(value["target"]):
            raise refused(path, f"a call of {value['target']!r:.60}")
        for name, child in value.items():
            plain = _RANGE if key == "range_constraints" else _TEXT
            if not plain.fullmatch(name) or (name in ("as_operator", "as_custom_obj", "as_graph") and child is not None):
                raise refused(path, f"{name!r:.60}")
            _check_graph(child, path, name)
    elif isinstance(value, list):
        for child in value:
            _check_graph(child, path, key)
    elif isinstance(value, str) and not _harmless(key, value):
        raise refused(path, f"the text {value!r:.60}")


def _harmless(key: str, text: str) -> bool:
    if key == "expr_str":
        return len(text) < 500 and bool(_SIZE.fullmatch(text))
    if key in ("in_spec", "out_spec"):
        return not text or _containers(text)
    return bool(_TEXT.fullmatch(text))


def _containers(text: str) -> bool:
    """Whether a tree of containers is of tuples, lists and dicts alone."""
    try:
        trees = [json.loads(text)[1]]
        while trees:
            tree = trees.pop()
            if tree["type"] not in _CONTAINERS or "__enum__" in str(tree["context"]):
                return False
            trees += tree["children_spec"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
    return True


def _operates(target: Any) -> bool:
    operation = re.fullmatch(r"torch\.ops\.aten\.(\w+)\.\w+", str(target))
    return operation[1].removesuffix("_") in COMPUTES if operation else target in PLAIN_ARITHMETIC


def _json(parts: Mapping[str, bytes], name: str, path: Path) -> Any:
    try:
        content = json.loads(parts[name])
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged, or no file of torch.export: {name} cannot be read in it") from error
    if not isinstance(content, dict) or (name.startswith("models/") and not isinstance(content.get("graph_module"), dict)):
        raise ValueError(f"{path}: damaged, or no file of torch.export: {name} in it holds something else")
    return content


def refused(path: Path, what: str) -> ValueError:
    return ValueError(f"{path}: refused, it holds {what}, which is no part of a network that this package exports")


_BUILT_IN = ("torch", "ops", "annotate", "getattr", "int", "float", "bool")  # the latter are called
_GRAMMAR: tuple[type[ast.AST], ...] = (
    *(ast.Module, ast.ClassDef, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AnnAssign, ast.Expr),
    *(
        ast.Name,
        ast.Attribute,
        ast.Call,
        ast.keyword,
        ast.Constant,
        ast.List,
        ast.Tuple,
        ast.Subscript,
        ast.UnaryOp,
        ast.BinOp,
    ),
    *(ast.expr_context, ast.operator, ast.unaryop),
)
