"""Shell completion: `medconv -sc install=bash`, then `-sc query=bash` with the typed line in COMP_LINE.

Hydra writes the shell function and completes overrides. It does not know subcommands; they and their flags
are completed here.
"""

import os
from collections.abc import Collection, Mapping, Sequence

from medconv import doors
from medconv.cli.parsers import Parser
from medconv.cli.show import show
from medconv.config import compose
from medconv.utils.exit_codes import DONE


def complete(arguments: Sequence[str], commands: Mapping[str, tuple[str, str]]) -> int:
    """Print the completions, or what Hydra is asked to install. Returns: the exit code.

    Args:
        commands: name -> purpose and module, as in `doors.COMMANDS`.
    """
    # medconv, the command, and the rest of the line unsplit
    words = os.environ.get("COMP_LINE", "").split(maxsplit=2)
    is_query = any(argument.startswith("query=") for argument in arguments)
    if not is_query:
        _let_hydra_answer(arguments)
    elif not _is_command_complete(words, commands):
        typed = words[1] if len(words) > 1 else ""
        print("\n".join(name for name in commands if name.startswith(typed)))
    else:
        parser: Parser = doors.load(commands[words[1]][1]).parser()
        typed = "".join(words[2:])
        begun = typed.split(" ")[-1]
        if begun.startswith("-") or not parser.takes_overrides:
            print("\n".join(flag for flag in parser._option_string_actions if flag.startswith("--")))
        else:
            # Hydra expects the line of a program without subcommands and without our flags.
            keys = filter(compose.is_key_value, typed.split(" ")[:-1])
            os.environ["COMP_LINE"] = " ".join([words[0], *keys, begun])
            _let_hydra_answer(arguments)
    return DONE


def _let_hydra_answer(arguments: Sequence[str]) -> None:
    show(compose.hydra_flags(arguments, "medconv"))


def _is_command_complete(words: Sequence[str], commands: Collection[str]) -> bool:
    """Whether the command is typed, with a blank after it."""
    if len(words) < 2 or words[1] not in commands:
        return False
    return os.environ["COMP_LINE"].partition(words[1])[2] != ""
