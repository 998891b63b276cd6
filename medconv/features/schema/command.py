"""`medconv schema`: the config as JSON schema, for editors."""

import argparse
import json

from medconv.cli.parsers import Parser
from medconv.utils.exit_codes import DONE


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


def run_command(options: argparse.Namespace) -> int:
    """Print the schema. Returns: the exit code."""
    from medconv.features.schema.json_schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return DONE
