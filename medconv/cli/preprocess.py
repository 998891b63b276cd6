"""`medconv preprocess`: check and prepare a dataset before training, or only look at it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from medconv.cli import overrides
from medconv.cli.parsers import Parser
from medconv.config import compose
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging


def main(arguments: Sequence[str]) -> int:
    options, rest = parser().parse_known_args(arguments)  # what is left is Hydra's
    if compose.only_shows(compose.hydra_flags(rest, "medconv preprocess")):
        start_logging()
        compose.run_with_config(lambda *_: None, rest)
        return DONE
    from medconv.training.preprocess import run_command  # loads torch

    return run_command(options, rest)


def parser() -> Parser:
    found = Parser(
        "preprocess",
        "data=msd data.root=/data/Task04_Hippocampus",
        "Check every file of a dataset and prepare it for training. Training does the same by itself.\n"
        "Takes the same GROUP=OPTION and KEY=VALUE as medconv train.",
    )
    found.allow_abbrev = False  # what is left over is Hydra's
    found.formatter_class = argparse.RawDescriptionHelpFormatter
    found.epilog = f"{overrides.listing()}\n\nhydra: as in medconv train --help"
    how = found.group("what to do").add_mutually_exclusive_group()
    how.add_argument("--check-only", action="store_true", help="show all cases and all faults; write nothing")
    how.add_argument("--verify", action="store_true", help="compare what is prepared with its checksums")
    found.general()
    return found
