"""Shell completion: `medconv -sc install=bash`, then `-sc query=bash` with the typed line in COMP_LINE.

Hydra writes the shell function and completes overrides. It does not know subcommands; they and their flags
are completed here.
"""

import importlib
import os
from collections.abc import Sequence

from medconv.cli.main import COMMANDS
from medconv.config import compose
from medconv.utils.exit_codes import DONE

_OVERRIDES = ("train", "preprocess")  # commands with Hydra overrides


def main(arguments: Sequence[str]) -> int:
    # medconv, the command, and the rest of the line unsplit
    words = os.environ.get("COMP_LINE", "").split(maxsplit=2)
    is_query = any(word.startswith("query=") for word in arguments)
    if is_query and not _is_complete(words):
        print("\n".join(name for name in COMMANDS if name.startswith(words[1] if len(words) > 1 else "")))
    elif is_query and words[1] not in _OVERRIDES:
        print("\n".join(_flags(words[1])))
    else:
        if is_query:
            os.environ["COMP_LINE"] = f"{words[0]} {''.join(words[2:])}"
        compose.run_with_config(lambda *_: None, arguments)
    return DONE


def _is_complete(words: Sequence[str]) -> bool:
    """Whether the command is typed, with a blank after it."""
    return len(words) > 1 and words[1] in COMMANDS and os.environ["COMP_LINE"].partition(words[1])[2] != ""


def _flags(command: str) -> list[str]:
    module = importlib.import_module(f"medconv.cli.{command.replace('-', '_')}")
    return [flag for flag in module.parser()._option_string_actions if flag.startswith("--")]
