"""The rooms of the package: a room imports only rooms before it in this list, and inside a room there are
no cycles.
"""

import ast
import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers.waiting import PATIENCE_S

import medconv

PACKAGE = Path(__file__).parent.parent / "medconv"
ROOMS = [
    "utils",
    "config",
    "convs",
    "models",
    "performance",
    "metrics",
    "targets",
    "data",
    "evaluation",
    "planning",
    "inference",
    "training",
    "cli",
]
FEATURES = sorted(path.name for path in (PACKAGE / "features").iterdir() if (path / "__init__.py").is_file())
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imports(path):
    """Every module of medconv that a file imports, at any depth of the code, by its full name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in full}
    return {name for name in names if name.split(".")[0] == "medconv"}


def room(module):
    return module.split(".")[1] if "." in module else ""


def test_the_package_is_its_rooms_and_nothing_loose():
    entries = {path.name for path in PACKAGE.iterdir() if not path.name.startswith("__pycache__")}
    assert entries == {*ROOMS, "features", "doors.py", "__init__.py", "__main__.py", "py.typed"}


def test_the_core_imports_no_feature():
    found = [
        f"{module} imports {other}"
        for module, path in MODULES.items()
        if room(module) != "features"
        for other in sorted(imports(path))
        if room(other) == "features"
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_says_what_it_is_and_imports_nothing(name):
    """It is imported by every command, and brings its parts by their names."""
    path = PACKAGE / "features" / name / "__init__.py"
    tree = ast.parse(path.read_text())
    assert (ast.get_docstring(tree) or "").split("\n\n")[0].endswith(".")
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_only_rooms_before_it(name):
    allowed = {"", "doors", *ROOMS[: ROOMS.index(name) + 1]}
    upward = [
        f"{module} imports {other}"
        for module, path in MODULES.items()
        if room(module) == name
        for other in sorted(imports(path))
        if room(other) not in allowed
    ]
    assert not upward, "\n".join(upward)


def test_inside_a_room_modules_import_each_other_in_one_direction():
    # The package itself has no room: it imports its public names when they are used.
    graph = {module: imports(path) - {module} for module, path in MODULES.items() if module != "medconv"}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail("a cycle of imports: " + " -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_says_what_lives_there(name):
    text = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text())) or ""
    assert text.split("\n\n")[0].endswith("."), f"medconv/{name}/__init__.py does not say what lives there"


def test_the_package_imports_nothing_until_a_public_name_is_used():
    code = """
import sys
before = set(sys.modules)
import medconv
assert {name for name in set(sys.modules) - before if name.startswith("medconv")} == {"medconv"}
assert set(medconv.__all__) <= set(dir(medconv))
medconv.list_options("model")
print(*{"torch", "lightning", "monai", "scipy"} & set(sys.modules))
"""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, check=True, timeout=PATIENCE_S, env=environment, stdout=subprocess.PIPE)
    assert output.stdout == b"\n"


def test_every_public_name_of_the_package_exists():
    for name in medconv.__all__:
        assert callable(getattr(medconv, name)), name
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        medconv.no_such_name  # noqa: B018


def test_the_convolutions_import_torch_alone():
    used = set()
    for path in (PACKAGE / "convs").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                used.add(node.module.split(".")[0])

    assert used - set(sys.stdlib_module_names) <= {"torch", "medconv"}


WITHOUT_HYDRA = """
import sys
sys.modules["hydra"] = None
import medconv
import medconv.convs
try:
    medconv.train
except ModuleNotFoundError as error:
    print(error)
"""


def test_with_torch_alone_there_are_layers_and_what_training_needs_is_named():
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", WITHOUT_HYDRA]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("medconv.train needs the package hydra: pip install medconv, without")
