"""`medconv COMMAND ...`: find the subcommand and run it. Torch is imported only when its work begins."""

import difflib
import os
import sys
from collections.abc import Sequence
from functools import partial

from medconv import __version__, doors
from medconv.cli.entrypoint import guard
from medconv.cli.parsers import arguments_as_flags
from medconv.utils.exit_codes import DONE

# Name -> one line for the help, and the module: as doors.COMMANDS, through which features bring further ones.
COMMANDS = {
    "train": ("train a network, or sweep over many settings", "medconv.cli.train"),
    "preprocess": ("check a dataset and preprocess it for training", "medconv.cli.preprocess"),
    "predict": ("predict new images with trained networks", "medconv.cli.predict"),
    "evaluate": ("compare predictions with references", "medconv.cli.evaluate"),
}
_TRAINING = ("train", "preprocess", "sweep", "ensemble")  # on Linux alone
# Hydra's flags.
COMPLETION = ("-sc", "--shell-completion")
_HELP = """\
example:
  medconv train data=msd data.root=/data/Task04_Hippocampus

Train CNNs on medical images, with one command for each step.

commands:
{commands}

For the options of a command: medconv COMMAND --help. For the version: medconv --version
Tab completion in bash: eval "$(medconv -sc install=bash)"; also fish and zsh"""


def main(command: str | None = None) -> None:
    """Run a subcommand on `sys.argv` and exit.

    Args:
        command: name of the subcommand; None: the first argument.
    """
    arguments = sys.argv[1:]
    if command is not None:
        arguments = [command, *arguments]
    # A notebook's commands inherit its backend for pictures, which is a module that they may lack.
    if os.environ.get("MPLBACKEND", "").startswith("module://"):
        os.environ["MPLBACKEND"] = "agg"
    sys.exit(guard(partial(run, arguments)))


def run(arguments: Sequence[str]) -> int:
    """Run a subcommand. Returns: the exit code.

    Raises:
        ValueError: no such command, or one that trains, and not Linux.
        Exception: any error of the command.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return DONE
    if "--version" in arguments:  # also after a command, where Hydra would print its own
        print(f"medconv {__version__}")
        return DONE
    if arguments[0] in COMPLETION:
        from medconv.cli import completion  # imports Hydra

        return completion.complete(arguments, commands())
    name, *arguments = arguments
    if name in _TRAINING and sys.platform != "linux":
        raise ValueError(
            f"medconv {name} runs on Linux only, and this is {sys.platform}; use WSL or a container"
        )
    known = commands()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
        raise ValueError(f"there is no command {name}; {hint}")
    module = doors.load(known[name][1])
    parser = module.parser()
    options = parser.parse_args(arguments)
    if not parser.takes_overrides and "package" in options and options.package:
        from medconv.config.instantiate import add_package  # loads Hydra

        for package in options.package:
            add_package(package)
    with arguments_as_flags(options):
        return int(module.run_command(options))


def commands() -> dict[str, tuple[str, str]]:
    """All commands: those of the core, and those that features bring."""
    return COMMANDS | doors.mapping(doors.COMMANDS)


def _help() -> str:
    purposes = {name: purpose for name, (purpose, _) in commands().items()}
    width = max(len(name) for name in purposes)
    lines = [f"  {name:<{width}}  {purpose}" for name, purpose in purposes.items()]
    return _HELP.format(commands="\n".join(lines))
