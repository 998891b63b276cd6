"""`medconv train`, `python train.py`: compose a config by Hydra and train; `-m` starts a sweep."""

from collections.abc import Sequence

from medconv.cli import overrides
from medconv.config import compose
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging

_HELP = """\
example:
  medconv train data=msd data.root=/data/Task04_Hippocampus
  medconv train -m model=customconv,segresnet optimizer.lr=1e-3,3e-3

Train a network; results are in runs/NAME/.
If a run was stopped, the same command resumes it.
`python train.py` in a checkout is the same as `medconv train`.

{overrides}

hydra:
  -m, --multirun              sweep: one run for each combination of KEY=A,B
  --cfg job                   print every key and its value instead of training
  --config-dir DIR            a folder with your own options, DIR/GROUP/OPTION.yaml
  --config-name NAME          use another main config than train
  --hydra-help                Hydra's other flags

general:
  -h, --help                  show this help and exit"""


def main(arguments: Sequence[str]) -> int:
    flags = compose.hydra_flags(arguments, "medconv train")
    if flags.help:
        print(help_text())
        return DONE
    if compose.only_shows(flags):
        start_logging()
        compose.show(flags, arguments)
        return DONE
    # Imported here, since it loads torch, which takes seconds.
    from medconv.sweeps.launch import run_command

    return run_command(arguments)


def help_text() -> str:
    """What `medconv train --help` prints; Hydra parses the arguments, so there is no parser to ask."""
    return _HELP.format(overrides=overrides.listing())
