"""What `medconv import-nnunet` does with its options."""

import argparse

from medconv.training.import_nnunet import import_model
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging


def run_command(options: argparse.Namespace) -> int:
    """`medconv import-nnunet` with these options. Returns: the exit code."""
    start_logging()
    import_model(options.folder, options.output, options.folds, options.checkpoint)
    return DONE
