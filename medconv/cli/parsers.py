"""An argument parser whose help shows an example first, and options that several commands share."""

import argparse
import difflib
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

_HELP = partial(argparse.HelpFormatter, max_help_position=30)


class Parser(argparse.ArgumentParser):
    """Args: command: name of the subcommand. example: its arguments. description: one sentence."""

    def __init__(self, command: str, example: str, description: str) -> None:
        program = f"medconv {command}"
        super().__init__(program, argparse.SUPPRESS, description, formatter_class=_HELP, add_help=False)
        self.example = f"{program} {example}"

    def format_help(self) -> str:
        lines = textwrap.wrap(self.example, 84, break_long_words=False, break_on_hyphens=False)
        example = " \\\n      ".join(lines)
        return f"example:\n  {example}\n\n{super().format_help()}"

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Raises: ValueError: no such option; ahead of one that is missing: it may be that one."""
        options = [option for option in self._option_string_actions if option.startswith("--")]
        for arg in args[: args.index("--")] if "--" in args else args:
            name = arg.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in options):
                near = difflib.get_close_matches(name, options, n=1)
                if near:
                    raise ValueError(f"there is no option {name}; did you mean {near[0]}?")
                self.error(f"there is no option {name}")
        return super().parse_args(args)

    def error(self, message: str) -> NoReturn:
        """Raises: ValueError: always; `guard` prints it like any other error."""
        raise ValueError(f"{message}; options: {self.prog} --help")

    def general(self) -> argparse._ArgumentGroup:
        """The last group, which has --help."""
        group = self.add_argument_group("general")
        group.add_argument("-h", "--help", action="help", help="show this help and exit")
        return group


def add_device(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", help="cpu, cuda, cuda:1, ...; default: the accelerator if there is one")


def add_trust(group: argparse._ArgumentGroup, what: str) -> None:
    help_text = f"trust {what} of this package of your own; may be repeated"
    group.add_argument("--trust-package", action="append", default=[], metavar="PACKAGE", help=help_text)
