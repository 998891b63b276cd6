"""`medconv train`, `python train.py`: compose a config by Hydra and train; `-m` starts a sweep."""

import argparse

from medconv.cli import overrides
from medconv.cli.parsers import Parser
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging

_HYDRA_FLAGS = """\
hydra:
  -m, --multirun              sweep: one run for each combination of KEY=A,B
  --cfg job                   print every key and its value instead of training
  --config-dir DIR            a folder with your own options, DIR/GROUP/OPTION.yaml
  --config-name NAME          use another main config than train
  --hydra-help                Hydra's other flags"""


def parser() -> Parser:
    command = Parser(
        "train",
        "data=msd data.root=/data/Task04_Hippocampus",
        "Train a network; results are in runs/NAME/.\n"
        "If a run was stopped, the same command resumes it.\n"
        "A sweep: medconv train -m model=customconv,segresnet optimizer.lr=1e-3,3e-3\n"
        "`python train.py` in a checkout is the same as `medconv train`.",
        takes_overrides=True,
    )
    command.epilog = f"{overrides.listing()}\n\n{_HYDRA_FLAGS}"
    command.general()
    return command


def run_command(options: argparse.Namespace) -> int:
    """Train, or only show what Hydra is asked for. Returns: the exit code."""
    from medconv.config import compose

    flags = compose.hydra_flags(options.overrides, "medconv train")
    if compose.only_shows(flags):
        start_logging()
        compose.show(flags, options.overrides)
        return DONE
    from medconv.sweeps.launch import train

    return train(options.overrides)
