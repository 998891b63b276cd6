"""Generated pages of the documentation: config keys, commands, notebooks, and the README as first page.

`python docs/site.py` writes `docs/reference/config.md`, every config key, from the schema and the comments of
`conf/`; and all pages of the site into `build/pages`, of which `make docs` builds it.
"""

import argparse
import json
import re
import shutil
import textwrap
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml

from medconv import doors
from medconv.cli.main import commands
from medconv.config.keys import Key, declared_keys
from medconv.config.schema import RunConfig, conf_dir
from medconv.config.values import enumeration, members

ROOT = Path(__file__).parents[1]
CONFIG_PAGE = ROOT / "docs/reference/config.md"
PAGES = ROOT / "build/pages"
NO_PAGES = ("*.py", "results")
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
KEYS = {key.name: key for key in declared_keys(RunConfig)}
FOLDED = ("derived", "hydra", "defaults")  # of train.yaml: filled in by the run, or Hydra's own


class Row(NamedTuple):
    """One key in a table.

    Args:
        values: type and range.
        default: of the option, as YAML.
        text: what the key is for.
    """

    key: str
    values: str
    default: str
    text: str


def write_pages() -> None:
    """All pages of the site: those of docs/, and the generated ones."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns(*NO_PAGES))
    pages = {
        "index.md": for_site((ROOT / "README.md").read_text()),
        "contributing.md": for_site((ROOT / "CONTRIBUTING.md").read_text()),
        "reference/cli.md": cli_page(),
        **{f"notebooks/{file.stem}.md": notebook_page(file) for file in NOTEBOOKS},
    }
    for place, text in pages.items():
        (PAGES / place).write_text(text)
    links = {"../CONTRIBUTING.md": "contributing.md", "../README.md": "index.md"}
    links |= {f"notebooks/{file.name}": f"notebooks/{file.stem}.md" for file in NOTEBOOKS}
    for file in PAGES.rglob("*.md"):
        markdown = file.read_text()
        for link, page in links.items():
            markdown = markdown.replace(f"]({link}", f"]({page}")
        file.write_text(markdown)


def notebook_page(file: Path) -> str:
    """Its cells, with the texts and pictures that are stored in it."""
    parts = []
    for cell in json.loads(file.read_text())["cells"]:
        text = "".join(cell["source"])
        language = "bash" if text.startswith("!") else "python"
        code = f"```{language}\n{text.removeprefix('!')}\n```"
        parts.append(text if cell["cell_type"] == "markdown" else code)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![](data:image/png;base64,{''.join(data['image/png'].split())})")
            else:
                lines = "".join(output.get("text", data.get("text/plain", ())))
                parts.append(f"```text\n{lines.rstrip()}\n```")
    return "\n\n".join([*parts, f"[This page as a notebook]({file.name})", ""])


def for_site(text: str) -> str:
    """Links of a file of the root folder, as they are in docs/."""
    return text.replace("](docs/", "](").replace("](CONTRIBUTING.md", "](contributing.md")


def cli_page() -> str:
    parts = ["# Commands\n\nWhat `medconv COMMAND --help` prints.\n"]
    for name, (_, module) in commands().items():
        text = doors.load(module).parser().format_help()
        parts.append(f"## medconv {name}\n\n```text\n{text.strip()}\n```\n")
    return "\n".join(parts)


def config_page() -> str:
    """The content of `CONFIG_PAGE`."""
    main_rows = [row for row in rows(conf_dir() / "train.yaml") if row.key.partition(".")[0] not in FOLDED]
    parts = [
        "# Config keys\n\n<!-- made by `python docs/site.py` -->\n",
        wrapped(
            "Set a key by `KEY=VALUE` on the command line, choose an option by `GROUP=OPTION`. Keys of "
            "Lightning's `Trainer` that are not listed work under `trainer`, too. `medconv train --cfg job` "
            "prints the values of a command."
        ),
        "## Main keys\n",
        *table(main_rows),
    ]
    for group in sorted(path for path in conf_dir().iterdir() if path.is_dir() and path.name != "hydra"):
        parts.append(f"## {group.name}\n")
        parts += table(typed_group(group))
        for option in sorted(group.glob("*.yaml")):
            if option.stem != "base":
                parts += [f"### {group.name}={option.stem}\n", opening(option), *table(rows(option))]
    return "\n".join(parts)


def typed_group(group: Path) -> list[Row]:
    """Every declared key of a group; defaults that the schema leaves to the options come from their files."""
    from_options: dict[str, str] = {}
    for file in sorted(group.glob("*.yaml"), key=lambda path: path.stem != "base"):
        for row in rows(file):
            from_options.setdefault(row.key, row.default)
    table_rows = []
    for name, key in KEYS.items():
        if name.startswith(f"{group.name}."):
            default = flow(yaml.safe_dump(key.default)) if key.has_default() else from_options.get(name, "")
            table_rows.append(Row(name, values_of(key), default, key.text))
    return table_rows


def values_of(key: Key) -> str:
    """Type and range of a key, such as `int or null, at least 1`."""
    if key.limits.choices:
        return key.expected()
    kind = enumeration([type_name(member) for member in members(key.kind)])
    bounds = key.expected().removeprefix("numbers, ")
    return f"{kind}, {bounds}" if bounds else kind


def type_name(kind: Any) -> str:
    if kind is NoneType:
        return "null"
    if get_origin(kind) is Literal:
        return enumeration(get_args(kind))
    is_simple = isinstance(kind, type) and not get_args(kind)
    name = kind.__name__ if is_simple else str(kind)
    return name.replace("typing.", "").replace("Any", "any")


def flow(text: str) -> str:
    """YAML on one line."""
    dumped = yaml.safe_dump(yaml.safe_load(text), default_flow_style=True, width=10_000)
    return dumped.removesuffix("...\n").strip()


def rows(file: Path) -> list[Row]:
    """A row for each leaf of a YAML file, with its comment, or else that behind the key above it."""
    source = file.read_text()
    lines = source.splitlines()
    leaves: list[Row] = []

    def walk(node: yaml.Node, prefix: str, comment_above: str) -> None:
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
                walk(value, f"{name}.", comment_behind(lines, key))
            elif key.value not in ("defaults", "_partial_"):
                plain = value.value if isinstance(value, yaml.ScalarNode) else flow(yaml.serialize(value))
                comment = comment_of(lines, key, value)
                declared = KEYS.get(name)
                values = values_of(declared) if declared else ""
                text = comment or (declared.text if declared else comment_above)
                leaves.append(Row(name, values, plain, text))

    root = yaml.compose(source)
    if isinstance(root, yaml.MappingNode):
        of_group = file.parent != conf_dir() and "# @package" not in source
        walk(root, f"{file.parent.name}." if of_group else "", "")
    return leaves


def comment_of(lines: list[str], key: yaml.Node, value: yaml.Node) -> str:
    """What stands behind a value, or in the lines above its key, but for the file's opening."""
    if value.start_mark.line == value.end_mark.line:
        behind = comment_behind(lines, value)
        if behind:
            return behind
    start = key.start_mark.line
    while start and lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return "" if start == 0 else " ".join(line.lstrip(" #") for line in lines[start : key.start_mark.line])


def comment_behind(lines: list[str], node: yaml.Node) -> str:
    """What stands behind a key or value on its line."""
    comment = re.search(r"\s#\s*(.*)", lines[node.end_mark.line][node.end_mark.column :])
    return comment[1] if comment else ""


def opening(file: Path) -> str:
    """The comment that a file begins with: when to take this option."""
    lines = file.read_text().splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return wrapped(" ".join(line.lstrip("# ") for line in comment if "@package" not in line))


def wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def table(table_rows: list[Row]) -> list[str]:
    if not table_rows:
        return []
    # the meaning beside the key: on a phone, the others are to the right of the screen
    lines = ["| key | meaning | value | type and range |", "|---|---|---|---|"]
    for row in table_rows:
        cells = [f"`{row.key}`", row.text, f"`{row.default}`", row.values]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


if __name__ == "__main__":
    # takes no arguments; --help and a typo must not write
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    CONFIG_PAGE.write_text(config_page())
    write_pages()
