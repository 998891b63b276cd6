"""The layers of the package: a part may import those above it in this list, and nothing below."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "medconv"
ORDER = [
    "atomic",
    "signals",
    "curves",
    "convs",
    "layers",
    "networks",
    "targets",
    "outcomes",
    "goals",
    "scoring",
    "outcome_pictures",
    "data",
    "losses",
    "outcome_losses",
    "metrics",
    "inference",
    "planning",
    "schedules",
    "performance",
    "optimizers",
    "pictures",
    "saliency",
    "tasks",
    "averaging",
    "outcome_views",
    "callbacks",
    "stopping",
    "loggers",
    "tracking",
    "saving",
    "resuming",
    "config",
    "trust",
    "composing",
    "commands",
    "checkpoint",
    "pretrained",
    "tracing",
    "nonfinite",
    "sides",
    "building",
    "postprocessing",
    "trained",
    "exported",
    "predicting",
    "circumstances",
    "exporting",
    "export",
    "runfolder",
    "reports",
    "dataset",
    "tuning",
    "run",
    "prepare",
    "predict",
    "evaluation",
    "evaluate",
    "wholefolds",
    "folds",
    "evidence",
    "jobs",
    "sweeptable",
    "slurm",
    "sweep",
    "search",
    "train",
    "postprocess",
    "cli",
]
TORCH_ONLY = ["convs", "layers"]
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at any depth; `from medconv import a` counts as `medconv.a`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            if node.module == "medconv":
                found |= {f"medconv.{alias.name}" for alias in node.names}
    return found - {"medconv"}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_upward_import(path: Path) -> None:
    own = part(path)
    assert own in ORDER, f"{own} has no place in the order"
    for module in imports(path):
        assert module.split(".")[0] not in ("benchmark", "benchmarks"), (
            f"{path} imports {module}, which is not part of the wheel"
        )
        if module.startswith("medconv."):
            other = module.split(".")[1]
            assert ORDER.index(other) <= ORDER.index(own), f"{path} imports {module}, which stands below it"


@pytest.mark.parametrize("path", [p for p in FILES if part(p) in TORCH_ONLY], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_convolutions_and_layers_need_torch_alone(path: Path) -> None:
    outside = {m.split(".")[0] for m in imports(path)} - set(sys.stdlib_module_names) - {"medconv", "torch", "triton"}
    assert not outside


def test_the_order_names_what_is_there() -> None:
    assert {part(path) for path in FILES} == set(ORDER)


def test_convolutions_are_usable_alone() -> None:
    import subprocess

    code = "import sys; from medconv.convs import swap_convs; assert not {'lightning', 'monai', 'hydra'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
