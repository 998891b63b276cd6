"""`medconv import-nnunet`: make run folders of a trained nnU-Net v2 model."""

import argparse
from pathlib import Path

from medconv.cli.parsers import Parser
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging


def parser() -> Parser:
    command = Parser(
        "import-nnunet",
        "nnUNet_results/DATASET/nnUNetTrainer__nnUNetPlans__3d_fullres --output runs/NAME",
        "Make a run folder OUTPUT/foldN of each fold of a trained nnU-Net v2 model. It predicts as nnU-Net "
        "does. To fine-tune: medconv train --config-dir OUTPUT/foldN experiment=finetune data.root=DATA",
    )
    group = command.add_argument_group("input and output")
    group.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder with plans.json, dataset.json and fold_N/"
    )
    group.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="parent of the run folders"
    )
    group.add_argument("--folds", nargs="+", metavar="N", help="such as 0 1, or all; default: all that exist")
    group.add_argument(
        "--checkpoint",
        default="checkpoint_final.pth",
        metavar="NAME",
        help="file name in each fold; default %(default)s",
    )
    command.general()
    return command


def run_command(options: argparse.Namespace) -> int:
    """Import the model. Returns: the exit code."""
    from medconv.features.nnunet.import_model import import_model

    start_logging()
    import_model(options.folder, options.output, options.folds, options.checkpoint)
    return DONE
