"""What `medconv find-postprocessing` does with its options: find the steps, and print them."""

import argparse
import shlex

from medconv.evaluation import cross_validation_report
from medconv.evaluation.cross_validation import CrossValidation
from medconv.evaluation.find_postprocessing import Result, find, select
from medconv.evaluation.postprocessing_decision import table
from medconv.inference.predict import usable_device
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import shown, start_logging


def run_command(options: argparse.Namespace) -> int:
    """`medconv find-postprocessing` with these options. Returns: the exit code."""
    start_logging()
    device = usable_device(options.device)
    selection = select(options.runs, options.select)
    print(shown(cross_validation_report.table(selection.crossval)) + "\n")
    result = find(selection, options.trust_package, device)
    _print_decision(result)
    _print_next_steps(result, selection.crossval)
    return DONE


def _print_decision(result: Result) -> None:
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
