"""Pages of the documentation site that are generated (a hook of mkdocs, see mkdocs.yml): every config key
from the schema and the comments of conf/, the commands from their parsers, and the README as first page.
"""

import importlib
import json
import re
from dataclasses import MISSING, fields, is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from medconv.cli.main import COMMANDS
from medconv.config.schema import RunConfig, conf_dir

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
Row = tuple[str, str, str, str]  # key, type, value, meaning
TYPED = {name: kind for name, kind in get_type_hints(RunConfig).items() if is_dataclass(kind)}
FOLDED = ("derived", "hydra", "defaults")  # of train.yaml: filled in by the run, or Hydra's own


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "index.md": for_site((ROOT / "README.md").read_text()),
        "contributing.md": for_site((ROOT / "CONTRIBUTING.md").read_text()),
        "reference/config.md": config_page(),
        "reference/cli.md": cli_page(),
        **{f"notebooks/{file.stem}.md": notebook_page(file) for file in NOTEBOOKS},
    }
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    places = {"../CONTRIBUTING.md": "contributing.md", "../README.md": "index.md"}
    places |= {f"notebooks/{file.name}": f"notebooks/{file.stem}.md" for file in NOTEBOOKS}
    for place, page in places.items():
        markdown = markdown.replace(f"]({place}", f"]({page}")
    return markdown


def notebook_page(file: Path) -> str:
    """Its cells, without the pictures that running it draws."""
    parts = []
    for cell in json.loads(file.read_text())["cells"]:
        text = "".join(cell["source"])
        language = "bash" if text.startswith("!") else "python"
        code = f"```{language}\n{text.removeprefix('!')}\n```"
        parts.append(text if cell["cell_type"] == "markdown" else code)
    return "\n\n".join([*parts, f"[This page as a notebook]({file.name})", ""])


def for_site(text: str) -> str:
    """Links of a file of the root folder, as they are in docs/."""
    return text.replace("](docs/", "](").replace("](CONTRIBUTING.md", "](contributing.md")


def cli_page() -> str:
    parts = ["# Commands\n\nWhat `medconv COMMAND --help` prints.\n"]
    for name in COMMANDS:
        module = importlib.import_module(f"medconv.cli.{name.replace('-', '_')}")
        text = module.parser().format_help() if hasattr(module, "parser") else module.help_text()
        parts.append(f"## medconv {name}\n\n```text\n{text.strip()}\n```\n")
    return "\n".join(parts)


def config_page() -> str:
    main = conf_dir() / "train.yaml"
    parts = [
        "# Config keys\n\nSet a key by `KEY=VALUE` on the command line, choose an option by "
        "`GROUP=OPTION`. Keys of Lightning's `Trainer` that are not listed work under `trainer`, too. "
        "`medconv train --cfg job` prints the values of a command.\n",
        "## Main keys\n",
        *table([row for row in rows(main) if row[0].partition(".")[0] not in FOLDED]),
    ]
    for group in sorted(path for path in conf_dir().iterdir() if path.is_dir() and path.name != "hydra"):
        parts.append(f"## {group.name}\n")
        if group.name in TYPED:
            parts += typed_group(group)
        for option in sorted(group.glob("*.yaml")):
            if option.stem != "base":
                parts += [f"### {group.name}={option.stem}\n", opening(option), *table(rows(option))]
    return "\n".join(parts)


def typed_group(group: Path) -> list[str]:
    """Every key of a group that the schema knows, with the first comment that any of its options has."""
    said: dict[str, tuple[str, str]] = {}
    for file in sorted(group.glob("*.yaml"), key=lambda path: path.stem != "base"):
        for key, _, value, comment in rows(file):
            if key not in said or (comment and not said[key][1]):
                said[key] = (value, comment)
    found = []
    for key, kind, default, _ in schema_rows(TYPED[group.name]):
        name = f"{group.name}.{key}"
        value, comment = said.get(name, (default, ""))
        found.append((name, kind, default or value, comment))
    return table(found)


def schema_rows(kind: Any) -> list[Row]:
    hints = get_type_hints(kind)
    return [(one.name, shown(hints[one.name]), default_of(one), "") for one in fields(kind)]


def default_of(one: Any) -> str:
    value = one.default_factory() if one.default_factory is not MISSING else one.default
    return "" if value is MISSING or value == "???" else flow(yaml.safe_dump(value))


def shown(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not getattr(kind, "__args__", None) else str(kind)
    return text.replace("typing.", "").replace(" | None", " or null").replace("Any", "any")


def flow(text: str) -> str:
    """YAML on one line."""
    dumped = yaml.safe_dump(yaml.safe_load(text), default_flow_style=True, width=10_000)
    return dumped.removesuffix("...\n").strip()


def types() -> dict[str, str]:
    known = {name: shown(kind) for name, kind in get_type_hints(RunConfig).items()}
    for group, kind in TYPED.items():
        known |= {f"{group}.{key}": text for key, text, *_ in schema_rows(kind)}
    return known


def rows(file: Path) -> list[Row]:
    """Key, type, value and comment of each leaf of a YAML file."""
    source = file.read_text()
    lines, known, found = source.splitlines(), types(), []

    def walk(node: yaml.Node, prefix: str) -> None:
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
                walk(value, f"{name}.")
            elif key.value not in ("defaults", "_partial_"):
                plain = value.value if isinstance(value, yaml.ScalarNode) else flow(yaml.serialize(value))
                found.append((name, known.get(name, ""), plain, comment_of(lines, key, value)))

    root = yaml.compose(source)
    if isinstance(root, yaml.MappingNode):
        of_group = file.parent != conf_dir() and "# @package" not in source
        walk(root, f"{file.parent.name}." if of_group else "")
    return found


def comment_of(lines: list[str], key: yaml.Node, value: yaml.Node) -> str:
    """What stands behind a value, or in the lines above its key, but for the file's opening."""
    if value.start_mark.line == value.end_mark.line:
        behind = re.search(r"\s#\s*(.*)", lines[value.end_mark.line][value.end_mark.column :])
        if behind:
            return behind[1]
    start = key.start_mark.line
    while start and lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return "" if start == 0 else " ".join(line.lstrip(" #") for line in lines[start : key.start_mark.line])


def opening(file: Path) -> str:
    """The comment that a file begins with: when to take this option."""
    lines = file.read_text().splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.lstrip("# ") for line in comment if "@package" not in line) + "\n"


def table(found: list[Row]) -> list[str]:
    if not found:
        return []
    head = ["| key | type | value | meaning |", "|---|---|---|---|"]
    cells = [[f"`{key}`", kind, f"`{value}`", text] for key, kind, value, text in found]
    return [*head, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells), ""]
