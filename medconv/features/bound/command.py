"""`medconv bound`: a table of lower bounds, and the cases that a person should look at."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from medconv.cli.parsers import Parser
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import shown, start_logging

if TYPE_CHECKING:
    from medconv.features.bound.bounds import Bound


def parser() -> Parser:
    command = Parser(
        "bound",
        "--predictions predictions --calibration metrics.json --limit 0.8",
        "Write PREDICTIONS/bounds.csv: for each case that medconv predict --quality wrote, a lower bound of "
        "its Dice. It holds in SHARE of cases that are like those of the calibration. The bounds are also "
        "in PREDICTIONS/prediction.json.",
    )
    inputs = command.add_argument_group("input")
    inputs.add_argument(
        "--predictions",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="written by medconv predict --quality",
    )
    inputs.add_argument(
        "--calibration",
        type=Path,
        required=True,
        metavar="FILE",
        help="metrics.json of medconv evaluate, of predictions with --quality for cases with a reference "
        "that the networks were not trained on",
    )
    choices = command.add_argument_group("bounds")
    choices.add_argument(
        "--share", type=float, default=0.9, help="of the cases, in which a bound holds; default: 0.9"
    )
    choices.add_argument(
        "--limit",
        type=float,
        metavar="DICE",
        help="list the cases with a class whose bound is lower, here and in both files",
    )
    command.general()
    return command


def run_command(options: argparse.Namespace) -> int:
    """Write the table, and list the cases below the limit. Returns: the exit code."""
    from medconv.features.bound import bounds

    start_logging()
    for name in ("share", "limit"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1:
            raise ValueError(f"--{name} must lie between 0 and 1, got {value}")
    rows = bounds.bounds(options.predictions, options.calibration, options.share)
    path = options.predictions / bounds.FILE
    bounds.write(rows, options.predictions, options.limit)
    cases = {row.case for row in rows if row.lower is not None}
    text = f"{path}: lower bounds of {len(cases)} cases"
    print(shown(f"{text}, which hold in {100 * options.share:.4g}% of such cases" if cases else text))
    without = sorted({row.name for row in rows if row.estimate is not None and row.lower is None})
    if without:
        # the smallest n for which n / (n + 1) reaches the share
        needed = ceil(round(options.share / (1 - options.share), 9))
        print(
            shown(
                f"no bound of {', '.join(without)}: {options.calibration} has too few cases with it; "
                f"--share {options.share} needs at least {needed}"
            )
        )
    if options.limit is not None:
        _print_below(rows, options.limit)
    return DONE


def _print_below(rows: Sequence[Bound], limit: float) -> None:
    """The cases that a person should look at, the lowest bound first; those without one last."""
    from medconv.features.bound import bounds

    below = [row for row in rows if bounds.is_below(row, limit)]
    below.sort(key=lambda row: 1.0 if row.lower is None else row.lower)
    print(f"\n{len({row.case for row in below})} cases to look at: a bound below {limit}, or none")
    for row in below:
        text = "no bound" if row.lower is None else f"at least {row.lower:.3f}"
        estimate = "not found" if row.estimate is None else f"estimated {row.estimate:.3f}"
        print(shown(f"  {row.case:<30} {row.name:<20} {text}, {estimate}"))
