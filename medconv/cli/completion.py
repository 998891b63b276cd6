"""What a shell asks for completion: `medconv -sc install=bash`, and `-sc query=bash` with the line in
COMP_LINE.

Hydra writes the shell's side and completes overrides. It does not know subcommands; they and their flags are
completed here.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

from medconv.cli.main import COMMANDS
from medconv.config import compose
from medconv.utils.exit_codes import DONE

_OVERRIDES = ("train", "preprocess")


def main(arguments: Sequence[str]) -> int:
    words = os.environ.get("COMP_LINE", "").split(
        maxsplit=2
    )  # medconv, the command, and the rest as it stands
    asks = any(word.startswith("query=") for word in arguments)
    if asks and not _is_complete(words):
        print("\n".join(name for name in COMMANDS if name.startswith(words[1] if len(words) > 1 else "")))
    elif asks and words[1] not in _OVERRIDES:
        print("\n".join(_flags(words[1])))
    else:
        if asks:
            os.environ["COMP_LINE"] = " ".join([words[0], *words[2:]]) + ("" if words[2:] else " ")
        compose.run_with_config(lambda *_: None, arguments)
    return DONE


def _is_complete(words: Sequence[str]) -> bool:
    """Whether the command has been typed, and a blank after it."""
    return len(words) > 1 and words[1] in COMMANDS and os.environ["COMP_LINE"].partition(words[1])[2] != ""


def _flags(command: str) -> list[str]:
    module = importlib.import_module(f"medconv.cli.{command.replace('-', '_')}")
    return [
        flag for action in module.parser()._actions for flag in action.option_strings if flag.startswith("--")
    ]
