"""Line lengths of documents and configs (ruff checks those of code); files and modules that documents name."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Without experiments/, which name files as they were then.
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("data/*.md")])
CONFIGS = sorted((ROOT / "conf").rglob("*.yaml"))
FOLDERS = "medconv|tests|scripts|conf|docs|data|experiments"


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_lines_of_documents_have_at_most_100_characters_except_tables(path):
    lines = enumerate(path.read_text().splitlines(), 1)
    long = [
        f"{name(path)}:{number}"
        for number, line in lines
        if len(line) > 100 and not line.lstrip().startswith("|")
    ]
    assert not long, f"over 100 characters: {', '.join(long)}"


def test_code_of_the_readme_fits_the_page():
    """80 characters are the width of the site at 1280 pixels."""
    blocks = re.findall(r"(?ms)^```\w+\n(.*?)^```", (ROOT / "README.md").read_text())
    long = [line for block in blocks for line in block.splitlines() if len(line) > 80]
    assert blocks and not long


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_lines_of_configs_have_at_most_110_characters(path):
    lines = enumerate(path.read_text().splitlines(), 1)
    long = [f"{name(path)}:{number}" for number, line in lines if len(line) > 110]
    assert not long, f"over 110 characters: {', '.join(long)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_files_that_documents_name_exist(path):
    text = path.read_text()
    named = set(
        re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./-]+\.(?:py|yaml|md|sbatch|json|png|svg))\b", text)
    )
    linked = {
        str((path.parent / link).relative_to(ROOT))
        for link in re.findall(r"\]\(([\w./-]+\.\w+)(?:#[\w-]+)?\)", text)
    }
    missing = sorted(file for file in named | linked if not (ROOT / file).exists())
    assert not missing, f"{name(path)} names files that do not exist: {', '.join(missing)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_modules_that_documents_name_exist(path):
    missing = []
    for dotted in set(re.findall(r"\bmedconv(?:\.[a-z_]\w*)+", path.read_text())):
        parts = dotted.split(".")
        lengths = [n for n in range(len(parts), 0, -1) if _exists(parts[:n])]
        rest = parts[lengths[0] :]
        if len(rest) > 1 or (rest and not _defines(parts[: lengths[0]], rest[0])):
            missing.append(dotted)
    assert not missing, f"{name(path)} names what does not exist: {', '.join(sorted(missing))}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_tests_that_documents_name_exist(path):
    """`FILE::test_x`, `test_x`, or `test_x...` for several that begin alike."""
    text = path.read_text()
    sources = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "tests").rglob("*.py")}
    tests = {file: re.findall(r"(?m)^def (test_\w+)", source) for file, source in sources.items()}
    known = {test for defined in tests.values() for test in defined} | {Path(file).stem for file in tests}
    named = re.findall(r"(?:(tests/[\w/]+\.py)::|(?<![\w/]))(test_\w+)(\.\.\.)?", text)
    missing = [
        f"{file}::{test}" if file else test
        for file, test, more in named
        if not any(test == one or (more and one.startswith(test)) for one in tests.get(file, known))
    ]
    assert not missing, f"{name(path)} names tests that do not exist: {', '.join(missing)}"


def _exists(parts):
    path = ROOT.joinpath(*parts)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _defines(parts, symbol):
    path = ROOT.joinpath(*parts)
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    return (
        re.search(
            rf"(?m)^(def|class) {symbol}\b|^{symbol}\b.*=|import .*\b{symbol}\b|^\s+\"?{symbol}\"?,", source
        )
        is not None
    )
