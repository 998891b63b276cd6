"""`medconv schema`: the config as JSON schema, for editors."""

import argparse
import json
from collections.abc import Sequence

from medconv.cli.parsers import Parser
from medconv.utils.exit_codes import DONE


def main(arguments: Sequence[str]) -> int:
    parser().parse_args(arguments)
    from medconv.config.json_schema import json_schema  # loads torch

    print(json.dumps(json_schema(), indent=2))
    return DONE


def parser() -> Parser:
    command = Parser(
        "schema",
        "> config.schema.json",
        "Print the JSON schema of a config, with which editors complete and check YAML files.\n"
        "In VS Code with the YAML extension: a first line\n"
        "# yaml-language-server: $schema=PATH/TO/config.schema.json",
    )
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.general()
    return command
