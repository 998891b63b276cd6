"""Every code block of README.md and of the pages for a first hour runs, on tiny data in the place of
`/data`, and so do the notebooks; a block that does not has a comment above it that says why. The commands of
the other pages are read by their parsers and composed by Hydra, but not run.
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from matplotlib import pyplot

import medconv
from medconv import doors
from medconv.cli import main
from medconv.config.compose import Composer, as_override, hydra_flags
from medconv.training import api

PAGES = ("README.md", "docs/get-started.md", "docs/python.md", "docs/own-convolution.md")
OTHER_PAGES = sorted(
    {str(path.relative_to(tiny.ROOT)) for path in (tiny.ROOT / "docs").glob("*.md")} - {*PAGES}
)
BLOCK = re.compile(r"(<!-- not run by tests: [^>]+ -->\n)?```(\w+)\n(.*?)```", re.DOTALL)
BLOCKS = [(page, *found) for page in PAGES for found in BLOCK.findall((tiny.ROOT / page).read_text())]
SHELL = [(page, text) for page, reason, language, text in BLOCKS if language == "bash" and not reason]
TRAINING = [setting for setting in tiny.SMALL if not setting.startswith(("model.", "trainer.max_steps"))]
TRAINING += ["trainer.max_time=null", "trainer.max_steps=1", "data.samples_per_epoch=2", "logger=none"]
TRAINING += ["callbacks=none", "plan.channels=[4,8]", "task.overlap=0"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data that the commands name, and one for each page, in which its commands run."""
    path = tmp_path_factory.mktemp("readme")
    data = path / "data"
    decathlon = tiny.write_dataset(data / "Task04_Hippocampus", cases=5)
    folders = (("imagesTr", "scans", "t1"), ("labelsTr", "masks", "seg"), ("labelsTr", "new_masks", "seg"))
    for kind, name, ending in folders:
        (data / name).mkdir()
        for file in (decathlon / kind).iterdir():
            case = file.name.removesuffix(".nii.gz")
            shutil.copy(file, data / name / f"{case}_{ending}.nii.gz")
    shutil.copytree(decathlon / "labelsTr", data / "new")  # images as good as any
    for page in PAGES:
        (path / page).mkdir(parents=True)
    return path


def commands(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


def with_tiny_data(text: str, home: Path) -> str:
    return text.replace("/data/", f"{home}/data/").replace("hippocampus_001", "case_0")


def smaller(words: list[str]) -> list[str]:
    """A training takes one step with a small network. What the options of the examples do is tested elsewhere:
    of these the config is composed.
    """
    if words[0] not in ("train", "ensemble") or "--cfg" in words:
        return words
    if len(words) == 1:
        return [*words, *TRAINING, "data.layout.num_cases=3", "data.patch_size=[16,16,16]"]
    if "-m" in words or words[0] == "ensemble":
        return [*words, "run.dry_run=true"]
    if not {"run.name=first", "run.name=mine", "run.name=plain", "run.name=own"} & set(words):
        return [*words, "--cfg", "job"]
    flat = "data.root=phantom" in words
    return [*words, *TRAINING, f"data.patch_size={[96, 96] if flat else [16, 16, 16]}".replace(" ", "")]


@pytest.mark.parametrize("page, text", SHELL, ids=[f"{page}:{text.splitlines()[0]}" for page, text in SHELL])
def test_commands_run(home: Path, monkeypatch: pytest.MonkeyPatch, page: str, text: str) -> None:
    monkeypatch.chdir(home / page)
    for program, *words in commands(with_tiny_data(text, home)):
        if program == "cd":
            monkeypatch.chdir(words[0])
            continue
        assert program == "medconv"
        assert tiny.call(monkeypatch, *smaller(words)) == 0, words


@pytest.fixture
def smaller_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs that Python composes are those of `smaller`."""
    compose = api.compose

    def compose_smaller(overrides: Sequence[str] = (), *, config_dir: Any = None, **values: Any) -> Any:
        words = [*overrides, *(as_override(name, value) for name, value in values.items())]
        size = [96, 96] if "data.root=phantom" in words else [16, 16, 16]
        small = [*words, *TRAINING, f"data.patch_size={size}".replace(" ", "")]
        return compose(small, config_dir=config_dir)

    monkeypatch.setattr(api, "compose", compose_smaller)
    monkeypatch.setattr(medconv, "compose", compose_smaller)


@pytest.mark.usefixtures("smaller_runs")
@pytest.mark.parametrize("page", PAGES)
def test_python_runs(home: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    """The blocks of a page in turn, with the variables of those before."""
    monkeypatch.chdir(home / page)
    names: dict[str, Any] = {}
    for name, reason, language, text in BLOCKS:
        if (name, language) == (page, "python") and not reason:
            exec(compile(with_tiny_data(text, home), page, "exec"), names)


def medconv_commands(page: str) -> list[list[str]]:
    """The arguments of each `medconv` and `python -m medconv.cli` of a page, whatever starts it."""
    found = []
    for _, language, text in BLOCK.findall((tiny.ROOT / page).read_text()):
        for words in commands(text.replace("medconv.cli ", "medconv ")) if language == "bash" else ():
            if "medconv" in words:
                found.append(words[words.index("medconv") + 1 :])
    return found


@pytest.mark.parametrize("page", [page for page in OTHER_PAGES if medconv_commands(page)])
def test_commands_of_other_pages_are_valid(page: str) -> None:
    for name, *words in medconv_commands(page):
        parser = doors.load(main.commands()[name][1]).parser()
        options = parser.parse_args(words)
        if parser.takes_overrides and "--config-dir" not in words:
            sweep = ["-m"] if name == "sweep" else []
            composer = Composer(hydra_flags([*options.overrides, *sweep], "medconv train"))
            assert composer.sweep_settings if composer.is_sweep else composer.configs(), words


def test_no_page_needs_a_checkout_to_train() -> None:
    """An installed user has `medconv`, and no train.py."""
    for page in [*PAGES, *OTHER_PAGES]:
        for _, language, text in BLOCK.findall((tiny.ROOT / page).read_text()):
            assert language != "bash" or "train.py" not in text, page


def test_other_languages_say_why_they_do_not_run() -> None:
    assert {language for _, reason, language, _ in BLOCKS if not reason} <= {"bash", "python"}


def run_notebook(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Its cells in turn, in this process; lines that begin with `!` are commands. Returns: its variables."""
    cells = json.loads((tiny.ROOT / "docs/notebooks" / name).read_text())["cells"]
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)  # as in a notebook's own process
    pyplot.switch_backend("agg")
    names: dict[str, Any] = {}
    for text in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        first, _, rest = text.partition("\n")
        if text.startswith("!"):
            (words,) = commands(text.removeprefix("!"))
            assert tiny.call(monkeypatch, *smaller(words[1:])) == 0, words
        elif first.startswith("%%writefile"):
            (folder / first.split()[1]).write_text(rest)
            invalidate_caches()
        else:
            exec(compile(text.replace("num_cases=24", "num_cases=6"), name, "exec"), names)
    pyplot.close("all")
    return names


@pytest.mark.usefixtures("smaller_runs")
def test_the_first_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_notebook("first_segmentation.ipynb", tmp_path, monkeypatch)
    assert len(names["points"]) == 1 and 0 <= names["points"][0][1] <= 1  # the last curve: one validation
    assert "large_organ" in names["scores"].per_class


@pytest.mark.usefixtures("smaller_runs")
def test_the_notebook_of_a_convolution_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, module)
    names = run_notebook("own_convolution.ipynb", tmp_path, monkeypatch)
    assert set(names["dice"]) == {"plain", "own"} and names["price"] > 0
    assert len(names["labels"]) == 6
    for module in ("mine", "mine.even_odd"):
        sys.modules.pop(module, None)
