"""`medconv find-postprocessing`: choose post-processing steps by cross-validation."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from medconv.cli.parsers import Parser, add_device, add_package
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import shown, start_logging

if TYPE_CHECKING:
    from medconv.features.cross_validation.results import CrossValidation
    from medconv.features.postprocessing.find import Result


def parser() -> Parser:
    command = Parser(
        "find-postprocessing",
        "--runs runs/cv",
        "Predict the validation cases of every fold, and write the post-processing that raises Dice to "
        "RUNS/postprocessing.json, for medconv predict --postprocess. To train the folds: "
        "medconv train -m data.fold=0,1,2,3,4 run.name=cv",
    )
    inputs = command.add_argument_group("input")
    inputs.add_argument(
        "--runs", type=Path, required=True, metavar="FOLDER", help="folder of a cross-validation"
    )
    inputs.add_argument(
        "--select", metavar="OVERRIDES", help="which cross-validation to use, if the folder holds several"
    )
    general = command.general()
    add_device(general)
    add_package(general)
    return command


def run_command(options: argparse.Namespace) -> int:
    """Find the steps, and print them. Returns: the exit code."""
    from medconv.features.cross_validation import report as cross_validation_report
    from medconv.features.postprocessing.find import find, select
    from medconv.inference.predict import usable_device

    start_logging()
    device = usable_device(options.device)
    selection = select(options.runs, options.select)
    print(shown(cross_validation_report.table(selection.crossval)) + "\n")
    result = find(selection, options.package, device)
    _print_decision(result)
    _print_next_steps(result, selection.crossval)
    return DONE


def _print_decision(result: Result) -> None:
    from medconv.features.postprocessing.decision import table

    decision = result.decision
    print(f"Dice over {result.num_cases} cases, each predicted by the network that was not trained on it")
    print(f"(1 where neither prediction nor reference has the class)\n\n{shown(table(decision))}\n")
    for name, before in decision.before.items():
        print(shown(f"  {name:<20} {before:.4f} -> {decision.after[name]:.4f}"))


def _print_next_steps(result: Result, crossval: CrossValidation) -> None:
    """The command that predicts with the steps."""
    print(f"\nsteps kept: {len(result.decision.accepted)}, in {result.path}")
    checkpoints = [str(fold.folder.best) for fold in crossval.folds]
    files = shlex.join([*checkpoints, "--postprocess", str(result.path)])
    print("to predict with all folds:")
    print(f"medconv predict --checkpoint {shown(files)} --input IMAGES --output PREDICTIONS")
