"""`medconv COMMAND ...`: find the subcommand and run it. Torch is imported only when its work begins."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType

from medconv import __version__, doors
from medconv.cli.entrypoint import guard
from medconv.cli.flags import arguments_as_flags
from medconv.utils.exit_codes import DONE

COMMANDS = {
    "train": "train a network, or sweep over many settings",
    "preprocess": "check a dataset and preprocess it for training",
    "predict": "predict new images with trained networks",
    "evaluate": "compare predictions with references",
    "find-postprocessing": "choose post-processing steps by cross-validation",
    "import-nnunet": "make run folders of a trained nnU-Net v2 model",
    "bench-conv": "time a convolution of yours against nn.Conv, and show what helps",
    "schema": "print the config's JSON schema, for editors",
}
# The work of the commands without overrides; imported when it begins, since it loads torch.
_WORK = {
    "predict": "medconv.cli.predict_command",
    "evaluate": "medconv.cli.evaluate_command",
    "find-postprocessing": "medconv.cli.find_postprocessing_command",
    "import-nnunet": "medconv.cli.import_nnunet_command",
}
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
    _leave_notebook_backend()
    sys.exit(guard(partial(run, arguments)))


def _leave_notebook_backend() -> None:
    """A notebook's commands inherit its backend for pictures, which is a module that they may lack."""
    if os.environ.get("MPLBACKEND", "").startswith("module://"):
        os.environ["MPLBACKEND"] = "agg"


def run(arguments: Sequence[str]) -> int:
    """Run a subcommand. Returns: the exit code.

    Raises:
        ValueError: no such command, or not Linux.
        Exception: any error of the command.
    """
    if sys.platform != "linux":
        raise ValueError(f"medconv runs on Linux, this is {sys.platform}; WSL or a container has one")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return DONE
    if arguments[0] == "--version":
        print(f"medconv {__version__}")
        return DONE
    if arguments[0] in COMPLETION:
        return int(_module("completion").main(arguments))
    return _run_command(arguments[0], arguments[1:])


def _run_command(name: str, arguments: Sequence[str]) -> int:
    if "--version" in arguments:  # Hydra would print its own
        print(f"medconv {__version__}")
        return DONE
    of_features = doors.mapping(doors.COMMANDS)
    if name in of_features:
        module = doors.load(of_features[name][1])
    elif name in COMMANDS:
        module = _module(name.replace("-", "_"))
        if name not in _WORK:
            return int(module.main(arguments))
    else:
        names = [*COMMANDS, *of_features]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(names)}"
        raise ValueError(f"there is no command {name}; {hint}")
    options = module.parser().parse_args(arguments)
    work = importlib.import_module(_WORK[name]) if name in _WORK else module
    with arguments_as_flags(options):
        return int(work.run_command(options))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"medconv.cli.{name}")


def _help() -> str:
    of_features = {name: purpose for name, (purpose, _) in doors.mapping(doors.COMMANDS).items()}
    purposes = COMMANDS | of_features
    width = max(len(name) for name in purposes)
    lines = [f"  {name:<{width}}  {purpose}" for name, purpose in purposes.items()]
    return _HELP.format(commands="\n".join(lines))
