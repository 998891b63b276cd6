"""The documentation site builds without a warning, and its generated pages have what they should."""

import importlib.util
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from medconv.config import conf_dir

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site: a broken link or a page outside the navigation fails here."""
    for package in ("zensical", "mkdocstrings"):
        pytest.importorskip(package, reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    (folder / "medconv").symlink_to(ROOT / "medconv")
    docs_site = site_module()
    docs_site.PAGES = folder / "build/pages"
    docs_site.write_pages()
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "build/site"


def site_module():
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs/site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_config_keys_is_that_of_the_schema():
    docs_site = site_module()
    assert docs_site.CONFIG_PAGE.read_text() == docs_site.config_page(), "run `python docs/site.py`"


def test_a_comment_of_the_configs_is_the_text_of_its_key():
    """What a user reads in conf/ is what the page, the JSON schema and editors say."""
    docs_site = site_module()
    options = ("data/base", "init/scratch", "perf/fast", "trainer/default")
    for name in ("train", *options):
        found = [row for row in docs_site.rows(conf_dir() / f"{name}.yaml") if row.key in docs_site.KEYS]
        assert len(found) > 3
        for row in found:
            assert row.text == docs_site.KEYS[row.key].text, f"{name}.yaml: {row.key}"


@pytest.mark.parametrize("name", ["first_segmentation", "own_convolution"])
def test_a_notebook_holds_its_pictures_and_no_paths(name):
    text = (ROOT / f"docs/notebooks/{name}.ipynb").read_text()
    outputs = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", ())]
    assert {"display_data", "execute_result", "stream"} >= {output["output_type"] for output in outputs}
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert not re.search(r"/(home|root|tmp|work)/", text)


def test_the_names_of_the_python_page_exist():
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    assert len(names) > 10
    for name in names:
        pkgutil.resolve_name(name)


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.read_text()))


@pytest.mark.parametrize(
    "row",
    [
        "run.resume auto resumes a stopped run; never starts a new one; or a checkpoint auto str",
        "run.checkpoint_interval DD:HH:MM:SS between checkpoints 00:00:10:00 str",  # of the schema
        "data.batch_size per device; null plans it null int or null, at least 1",  # a range, and null
        "perf.timeout_seconds how long to wait",
        "float, more than 0 and finite",  # a range
        "conv.bank jet, laplacian, lines, gabor",  # of an option
        "augmentation.p.rotation probability of each transform 1",  # the comment of the keys above
    ],
)
def test_every_kind_of_config_key_has_its_row(site, row):
    assert row in text_of(site / "reference/config/index.html")


def test_commands_and_python_have_their_pages(site):
    assert "--save-probabilities also write" in text_of(site / "reference/cli/index.html")
    assert "Kernels that are even or odd" in text_of(site / "notebooks/own_convolution/index.html")
    assert "Replace, in place, every spatial convolution" in text_of(site / "reference/api/index.html")


def test_code_has_its_language_by_which_the_style_sheet_wraps_it(site):
    assert "language-bash highlight" in (site / "index.html").read_text()
