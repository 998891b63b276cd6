"""`medconv preprocess`: check and preprocess a dataset before training, or only check it."""

import argparse

from medconv.cli.parsers import Parser, add_package
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging


def parser() -> Parser:
    command = Parser(
        "preprocess",
        "data=msd data.root=/data/Task04_Hippocampus",
        "Check every file of a dataset and preprocess it. Training does this by itself if needed.\n"
        "Takes the same GROUP=OPTION and KEY=VALUE as medconv train.",
        takes_overrides=True,
    )
    actions = command.add_argument_group("what to do").add_mutually_exclusive_group()
    actions.add_argument(
        "--check-only",
        action="store_true",
        help="show cases and errors, but prepare nothing; only new and changed files are read again",
    )
    actions.add_argument(
        "--verify", action="store_true", help="compare preprocessed files with their checksums"
    )
    add_package(command.general())
    return command


def run_command(options: argparse.Namespace) -> int:
    """Preprocess, or only show what Hydra is asked for. Returns: the exit code."""
    from medconv.config import compose

    flags = compose.hydra_flags(options.overrides, "medconv preprocess", options.package)
    start_logging()
    if flags.only_shows:
        from medconv.cli.show import show

        show(flags)
        return DONE
    # Not before: it loads torch, which takes seconds.
    from medconv.cli.preprocess_report import preprocess
    from medconv.config import ConfigError, validate

    configs = [validate(composed.values) for composed in compose.Composer(flags).configs()]
    if any(config.run.dry_run for config in configs):
        raise ConfigError(
            "run.dry_run=true: medconv preprocess --check-only prints the plan without preparing"
        )
    preprocess(configs, checks_only=options.check_only, verifies=options.verify)
    return DONE
