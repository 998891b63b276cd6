"""`medconv bench-conv`: what a convolution costs beside `nn.Conv`, at the sizes of a network."""

import argparse
import json
from pathlib import Path

from medconv.cli.parsers import Parser, add_package
from medconv.utils.atomic_io import write_text
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging


def parser() -> Parser:
    command = Parser(
        "bench-conv",
        "mine.MyConv model=segresnet data.patch_size=[40,56,40]",
        "Time a convolution against nn.Conv at each size that a network has, forward and\n"
        "backward, and show what limits it and what helps. Needs no data.\n"
        "Takes model=, conv.KEY= and data.patch_size= as in medconv train.",
        takes_overrides=True,
        option_groups=("conv", "model"),
    )
    required = command.add_argument_group("required")
    required.add_argument("conv", help="an option such as transform, or your class, such as mine.MyConv")
    sizes = command.add_argument_group("sizes")
    sizes.add_argument("--inputs", type=int, default=1, metavar="N", help="channels of the image (1)")
    sizes.add_argument("--outputs", type=int, default=2, metavar="N", help="classes (2)")
    sizes.add_argument("--batch", type=int, default=2, metavar="N", help="patches (2)")
    measuring = command.add_argument_group("measuring")
    measuring.add_argument("--pairs", type=int, default=15, metavar="N", help="rounds of timings (15)")
    measuring.add_argument(
        "--compile", action="store_true", help="also time torch.compile; takes up to a minute"
    )
    measuring.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    add_package(command.general())
    return command


def run_command(options: argparse.Namespace) -> int:
    """Measure and print. Returns: the exit code."""
    from medconv.features.diagnosis import bench_conv

    start_logging()
    sizes = bench_conv.Sizes(options.inputs, options.outputs, options.batch)
    rows = []
    for overrides, config in bench_conv.configs_with(options.conv, options.overrides, options.package):
        own_rows = bench_conv.measure(config, sizes, options.pairs, options.compile)
        print(bench_conv.table(own_rows))
        rows += [{**row, "overrides": overrides} for row in own_rows]
        if options.json is not None:
            write_text(options.json, json.dumps(rows, indent=1) + "\n")
    return DONE
