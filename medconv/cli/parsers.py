"""An argument parser whose help shows an example first, and options that several commands share."""

import argparse
import difflib
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import NoReturn, TypeAlias

# argparse has no public name for it.
Group: TypeAlias = argparse._ArgumentGroup
_HELP_FORMATTER = partial(argparse.HelpFormatter, max_help_position=30)
_EXAMPLE_WIDTH = 84  # characters


class Parser(argparse.ArgumentParser):
    """The parser of a subcommand.

    Args:
        command: name of the subcommand.
        example: its arguments.
        description: one sentence; with `takes_overrides`, lines as they are printed.
        takes_overrides: unknown arguments are left for Hydra, as `overrides` of the options.
    """

    def __init__(self, command: str, example: str, description: str, takes_overrides: bool = False) -> None:
        super().__init__(
            prog=f"medconv {command}",
            usage=argparse.SUPPRESS,
            description=description,
            # The list of options in the epilog has its own line breaks.
            formatter_class=argparse.RawDescriptionHelpFormatter if takes_overrides else _HELP_FORMATTER,
            # What begins like an option may be Hydra's.
            allow_abbrev=not takes_overrides,
            # `general` adds it, as the last group.
            add_help=False,
        )
        self.example = f"{self.prog} {example}"
        self.takes_overrides = takes_overrides

    def format_help(self) -> str:
        lines = textwrap.wrap(self.example, _EXAMPLE_WIDTH, break_long_words=False, break_on_hyphens=False)
        example = " \\\n      ".join(lines)
        return f"example:\n  {example}\n\n{super().format_help()}"

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse all arguments.

        Raises:
            ValueError: no such option. It is reported before a missing one, which it may be, misspelt.
        """
        if self.takes_overrides:
            options, overrides = self.parse_known_args(args)
            options.overrides = overrides
            return options
        self._check_options(args)
        return super().parse_args(args)

    def _check_options(self, args: Sequence[str]) -> None:
        options = [option for option in self._option_string_actions if option.startswith("--")]
        for arg in args:
            # Only positional arguments follow.
            if arg == "--":
                return
            name = arg.partition("=")[0]
            # argparse allows the beginning of an option.
            if not name.startswith("--") or any(option.startswith(name) for option in options):
                continue
            near = difflib.get_close_matches(name, options, n=1)
            if near:
                raise ValueError(f"there is no option {name}; did you mean {near[0]}?")
            self.error(f"there is no option {name}")

    def error(self, message: str) -> NoReturn:
        """Raises: ValueError: always; `guard` prints it like any other error."""
        raise ValueError(f"{message}; options: {self.prog} --help")

    def general(self) -> Group:
        """The last group, which has --help."""
        group = self.add_argument_group("general")
        group.add_argument("-h", "--help", action="help", help="show this help and exit")
        return group


def add_device(group: Group) -> None:
    group.add_argument("--device", help="cpu, cuda, cuda:1, ...; default: the accelerator if there is one")


def add_package(group: Group) -> None:
    group.add_argument(
        "--package",
        action="append",
        default=[],
        metavar="NAME",
        help="import this package of your own, and trust its classes; may be repeated",
    )
