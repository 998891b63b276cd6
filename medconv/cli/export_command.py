"""What `medconv export` does with its options."""

import argparse
import logging

from medconv.export.export import ExportOptions, export
from medconv.export.formats import FORMATS
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging

log = logging.getLogger(__name__)


def run_command(options: argparse.Namespace) -> int:
    """`medconv export` with these options. Returns: the exit code."""
    start_logging()
    if options.format not in FORMATS:
        raise ValueError(f"--format must be one of {', '.join(FORMATS)}, got {options.format}")
    choices = ExportOptions(
        format=options.format, opset=options.opset, case=options.case, tolerance=options.tolerance
    )
    export(options.checkpoint, options.output, choices, options.trust_package)
    if options.case is None:
        log.info("--case IMAGE also compares the logits on a real case")
    return DONE
