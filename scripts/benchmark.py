"""`python scripts/benchmark.py NAME`: measure against a named peer in the same run; a table on screen,
rows as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks import results
from medconv.cli.entrypoint import guard
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging

NAMES = (
    "convs",
    "learning",
    "shifts",
    "layers",
    "step",
    "scaling",
    "data",
    "preparing",
    "workers",
    "recipe",
    "zoo",
    "evaluation",
    "prediction",
    "whole_body",
    "export",
    "fault_tolerance",
    "classification",
)


def main() -> None:
    sys.exit(guard(_main))


def _main() -> int:
    parser = argparse.ArgumentParser("benchmark.py", description=__doc__)
    choices = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    parts = {name: importlib.import_module(f"benchmarks.{name}") for name in NAMES}
    for name, part in parts.items():
        chosen = choices.add_parser(name, help=part.__doc__, description=part.__doc__)
        chosen.add_argument("--json", type=Path, help="write the rows there")
        part.add_arguments(chosen)
    options = parser.parse_args()
    start_logging()
    rows = parts[options.name].run(options)
    if options.json:
        results.write(rows, options.json)
    print(parts[options.name].show(rows))
    return DONE


if __name__ == "__main__":
    main()
