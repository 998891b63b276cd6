"""Every code block of README.md and of the pages for a first hour runs, on tiny data in the place of
`/data`, and so do the notebooks; a block that does not has a comment above it that says why. The commands of
the other pages are read by their parsers and composed by Hydra, but not run: `test_installed_pages.py`, which is
slow, runs them.
"""

import json
import sys
from importlib import invalidate_caches

import pytest
from helpers import pages, tiny
from matplotlib import pyplot

import medconv
from medconv import doors
from medconv.cli import main
from medconv.config.compose import Composer, as_override, hydra_flags
from medconv.training import api

PAGES = pages.FIRST_HOUR
SHELL = [(page, text) for page in PAGES for text in pages.runnable(page, "bash")]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the data that the commands name, and one for each page, in which its commands run."""
    path = tmp_path_factory.mktemp("readme")
    pages.write_data(path)
    for page in PAGES:
        (path / page).mkdir(parents=True)
    return path


@pytest.mark.parametrize("page, text", SHELL, ids=[f"{page}:{text.splitlines()[0]}" for page, text in SHELL])
def test_commands_run(home, monkeypatch, page, text):
    monkeypatch.chdir(home / page)
    for program, *words in pages.commands(pages.with_tiny_data(text, home)):
        assert program == "medconv"
        assert tiny.call(monkeypatch, *pages.smaller(words)) == 0, words


@pytest.fixture
def smaller_runs(monkeypatch):
    """Configs that Python composes are those of `smaller`."""
    compose = api.compose

    def compose_smaller(overrides=(), *, config_dir=None, **values):
        words = [*overrides, *(as_override(name, value) for name, value in values.items())]
        size = [96, 96] if "data.root=phantom" in words else [16, 16, 16]
        small = [*words, *pages.TRAINING, f"data.patch_size={size}".replace(" ", "")]
        return compose(small, config_dir=config_dir)

    # In this order: `medconv.compose` is looked up in `api`, and what is found now is put back later.
    monkeypatch.setattr(medconv, "compose", compose_smaller)
    monkeypatch.setattr(api, "compose", compose_smaller)


@pytest.mark.usefixtures("smaller_runs")
@pytest.mark.parametrize("page", PAGES)
def test_python_runs(home, monkeypatch, page):
    """The blocks of a page in turn, with the variables of those before."""
    monkeypatch.chdir(home / page)
    names = {}
    for text in pages.runnable(page, "python"):
        exec(compile(pages.with_tiny_data(text, home), page, "exec"), names)


def medconv_commands(page):
    """The arguments of each `medconv` and `python -m medconv.cli` of a page, whatever starts it."""
    found = []
    for _, _, language, text in pages.blocks(page):
        for words in pages.commands(text.replace("medconv.cli ", "medconv ")) if language == "bash" else ():
            if "medconv" in words:
                found.append(words[words.index("medconv") + 1 :])
    return found


@pytest.mark.parametrize("page", [page for page in pages.OTHER if medconv_commands(page)])
def test_commands_of_other_pages_are_valid(page):
    for name, *words in medconv_commands(page):
        parser = doors.load(main.commands()[name][1]).parser()
        options = parser.parse_args(words)
        if parser.takes_overrides and "--config-dir" not in words:
            sweep = ["-m"] if name == "sweep" else []
            composer = Composer(hydra_flags([*options.overrides, *sweep], "medconv train"))
            assert composer.sweep_settings if composer.is_sweep else composer.configs(), words


def test_no_page_needs_a_checkout_to_train():
    """An installed user has `medconv`, and no train.py."""
    for page in [*PAGES, *pages.OTHER]:
        for _, _, language, text in pages.blocks(page):
            assert language != "bash" or "train.py" not in text, page


def test_other_languages_say_why_they_do_not_run():
    found = [block for page in PAGES for block in pages.blocks(page)]
    assert {block.language for block in found if not block.reason} <= {"bash", "python"}


def run_notebook(name, folder, monkeypatch):
    """Its cells in turn, in this process; lines that begin with `!` are commands. Returns: its variables."""
    cells = json.loads((tiny.ROOT / "docs/notebooks" / name).read_text())["cells"]
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)  # as in a notebook's own process
    pyplot.switch_backend("agg")
    names = {}
    for text in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        first, _, rest = text.partition("\n")
        if text.startswith("!"):
            (words,) = pages.commands(text.removeprefix("!"))
            assert tiny.call(monkeypatch, *pages.smaller(words[1:])) == 0, words
        elif first.startswith("%%writefile"):
            (folder / first.split()[1]).write_text(rest)
            invalidate_caches()
        else:
            exec(compile(text.replace("num_cases=24", "num_cases=6"), name, "exec"), names)
    pyplot.close("all")
    return names


@pytest.mark.usefixtures("smaller_runs")
def test_the_first_notebook_runs(tmp_path, monkeypatch):
    names = run_notebook("first_segmentation.ipynb", tmp_path, monkeypatch)
    assert len(names["points"]) == 1 and 0 <= names["points"][0][1] <= 1  # the last curve: one validation
    assert "large_organ" in names["scores"].per_class


@pytest.mark.slow
@pytest.mark.usefixtures("smaller_runs")
def test_the_notebook_of_a_convolution_runs(tmp_path, monkeypatch):
    for module in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, module)
    names = run_notebook("own_convolution.ipynb", tmp_path, monkeypatch)
    assert set(names["dice"]) == {"plain", "own"} and names["price"] > 0
    assert len(names["labels"]) == 6
    for module in ("mine", "mine.even_odd"):
        sys.modules.pop(module, None)
