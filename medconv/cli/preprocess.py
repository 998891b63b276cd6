"""`medconv preprocess`: check and preprocess a dataset before training, or only check it."""

import argparse
from collections.abc import Sequence

from medconv.cli import overrides
from medconv.cli.parsers import Parser
from medconv.config import compose
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging


def main(arguments: Sequence[str]) -> int:
    options, rest = parser().parse_known_args(arguments)  # the rest is for Hydra
    if compose.only_shows(compose.hydra_flags(rest, "medconv preprocess")):
        start_logging()
        compose.run_with_config(lambda *_: None, rest)
        return DONE
    from medconv.training.preprocess import run_command  # loads torch

    return run_command(options, rest)


def parser() -> Parser:
    command = Parser(
        "preprocess",
        "data=msd data.root=/data/Task04_Hippocampus",
        "Check every file of a dataset and preprocess it. Training does the same by itself.\n"
        "Takes the same GROUP=OPTION and KEY=VALUE as medconv train.",
    )
    command.allow_abbrev = False  # what it does not know is for Hydra
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = f"{overrides.listing()}\n\nhydra: as in medconv train --help"
    actions = command.add_argument_group("what to do").add_mutually_exclusive_group()
    actions.add_argument("--check-only", action="store_true", help="show cases and errors, write nothing")
    actions.add_argument("--verify", action="store_true", help="compare prepared files with checksums")
    command.general()
    return command
