"""The argument parser of all commands, options that several share, and errors that name their flags."""

import argparse
import difflib
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn, TypeAlias

from medconv.utils.errors import ArgumentError

# argparse has no public name for it.
Group: TypeAlias = argparse._ArgumentGroup
_HELP_FORMATTER = partial(argparse.HelpFormatter, max_help_position=30)
# In characters.
_EXAMPLE_WIDTH = 84
_OPTIONS_WIDTH = 80
_GROUP_WIDTH = 26  # of the name of a group of options
_AFTER_GROUPS = """\

KEY=VALUE:
  trainer.max_epochs=100      any key of --cfg job; +KEY=VALUE adds an argument
                              that the class accepts

hydra:
"""


class Parser(argparse.ArgumentParser):
    """The parser of a subcommand, whose help shows an example first.

    Args:
        command: name of the subcommand.
        example: its arguments.
        description: one sentence; with `takes_overrides`, lines as they are printed.
        takes_overrides: unknown arguments are left for Hydra, as `overrides` of the options.
        option_groups: those whose options the help lists; None: all.
        hydra: what the help says of Hydra's flags.
    """

    def __init__(
        self,
        command: str,
        example: str,
        description: str,
        takes_overrides: bool = False,
        option_groups: Sequence[str] | None = None,
        hydra: str = "  as in medconv train --help",
    ) -> None:
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
        self.option_groups = option_groups
        self.hydra = hydra

    def format_help(self) -> str:
        if self.takes_overrides:
            self.epilog = _options_of_groups(self.option_groups) + _AFTER_GROUPS + self.hydra
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
        known = [option for option in self._option_string_actions if option.startswith("--")]
        for arg in args:
            # Only positional arguments follow.
            if arg == "--":
                break
            name = arg.partition("=")[0]
            # argparse allows the beginning of an option.
            if not name.startswith("--") or any(option.startswith(name) for option in known):
                continue
            near = difflib.get_close_matches(name, known, n=1)
            if near:
                raise ValueError(f"there is no option {name}; did you mean {near[0]}?")
            self.error(f"there is no option {name}")
        return super().parse_args(args)

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


def _options_of_groups(names: Sequence[str] | None) -> str:
    """An explanation of GROUP=OPTION, with a line for each folder of `conf/`, or for those of these names."""
    from medconv.config.schema import groups, list_options  # for the help alone

    lines = ["GROUP=OPTION:"]
    for group in names or groups():
        lines += textwrap.wrap(
            ", ".join(list_options(group)),
            _OPTIONS_WIDTH,
            initial_indent=f"  {group:<{_GROUP_WIDTH}}",
            subsequent_indent=" " * (_GROUP_WIDTH + 2),
            break_on_hyphens=False,
        )
    return "\n".join([*lines, ""])


def flag_of(option: str) -> str:
    """The flag of an option, such as `--mirror-axes` of `mirror_axes`."""
    return f"--{option.replace('_', '-')}"


def name_of(flag: str) -> str:
    """The option of a flag, such as `mirror_axes` of `--mirror-axes`."""
    return flag.removeprefix("--").replace("-", "_")


@contextmanager
def arguments_as_flags(options: argparse.Namespace) -> Iterator[None]:
    """Inside, an error about an argument that is also an option names the flag in its place.

    Raises:
        ValueError: instead of the `ArgumentError`.
    """
    try:
        yield
    except ArgumentError as error:
        if not hasattr(options, error.argument):
            raise
        message = error.renamed(lambda name: flag_of(name) if hasattr(options, name) else name)
        raise ValueError(message) from error
