"""What the convolutions cost: against nn.Conv, against naive code, in small layers, and in their backward
pass.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from math import exp, log

import torch

from benchmarks.conv_backward import backward
from benchmarks.conv_layers import LIBRARY, PASSES, image, layers
from benchmarks.conv_small import small
from benchmarks.results import Row, conditions, table
from medconv.features.diagnosis.alternating import alternate

# Stages of a U-Net: channels, and the size of a hippocampus patch in 3D, of a slice in 2D.
STAGES: dict[int, list[tuple[int, tuple[int, ...]]]] = {
    3: [(32, (40, 56, 40)), (64, (20, 28, 20)), (128, (10, 14, 10)), (256, (5, 7, 5))],
    2: [(32, (256, 256)), (64, (128, 128)), (128, (64, 64)), (256, (32, 32))],
}
# Timed a fifth as often: the differences are large.
MANY_TIMES_SLOWER = ("separable", "unfold and einsum")

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument(
        "--layers", nargs="+", metavar="NAME", help="of the stages, such as basis mirror; default: all"
    )
    parser.add_argument("--pairs", type=int, default=30, help="rounds in which every variant is timed once")
    parser.add_argument("--batch", type=int, default=2, help="samples, for the stages of a U-Net")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"], help="of autocast"
    )


def run(options: argparse.Namespace) -> list[Row]:
    around = {**conditions(options.device), "dtype": options.dtype}
    return [{**row, **around} for part in options.parts for row in PARTS[part](options)]


def show(rows: Sequence[Row]) -> str:
    """Stages as one table for each kind of pass, ratios to the library with their spread; the other parts
    row by row.
    """
    tables = []
    grid = [row for row in rows if row["benchmark"] == "stages"]
    for kind in dict.fromkeys(row["case"].split(",")[0] for row in grid):
        of_kind = [row for row in grid if row["case"].split(",")[0] == kind]
        lines: dict[str, Row] = {}
        for row in of_kind:
            column = row["case"].split(", ")[1].replace(" channels", "")
            spread = f" ±{row['spread'] / 2:.2f}" if "spread" in row else ""
            lines.setdefault(row["variant"], {kind: row["variant"]})[column] = f"{row['ratio']:.2f}{spread}"
        columns = list(dict.fromkeys(column for line in lines.values() for column in line))
        tables.append(table(list(lines.values()), columns))
    for part in ("small", "backward"):
        of_part = [row for row in rows if row["benchmark"] == part]
        skipped = ("benchmark", "reference", *conditions(), "dtype")
        if of_part:
            tables.append(table(of_part, [key for key in of_part[0] if key not in skipped]))
    return "\n\n".join(tables)


def stages(options: argparse.Namespace) -> list[Row]:
    """Forward, forward with backward, and both with AdamW's update, of every convolution at a U-Net's
    sizes.
    """
    known = layers(3, 8, argparse.Namespace(**{**vars(options), "layers": None}))
    if unknown := [name for name in options.layers or () if name not in known]:
        raise ValueError(f"--layers must be of {', '.join(known)}; got {', '.join(unknown)}")
    rows = []
    for dims, sizes in STAGES.items():
        for channels, size in sizes:
            x = image(options, options.batch, channels, size, needs_grad=True)
            variants = layers(dims, channels, options)
            where = f"{channels} channels at {'x'.join(map(str, size))}, batch {options.batch}"
            for what, make in PASSES.items():
                runs = {name: make(layer, x, options) for name, layer in variants.items()}
                # Each in pairs with the library's: a slow variant would slow the next one down.
                for name in variants:
                    pair = {LIBRARY: runs[LIBRARY], name: runs[name]}
                    pairs = options.pairs if name not in MANY_TIMES_SLOWER else max(1, options.pairs // 5)
                    calls = 10 if options.device == "cuda" else 1
                    timing = {**alternate(pair, LIBRARY, pairs, calls=calls)[name], "pairs": pairs}
                    row = {
                        "benchmark": "stages",
                        "case": f"{dims}D {what}, {where}",
                        "variant": name,
                        "reference": LIBRARY,
                    }
                    rows.append({**row, **timing})
            logger.info("%dD, %s: measured", dims, where)
    return rows + _means(rows)


def _means(rows: Sequence[Row]) -> list[Row]:
    """Geometric mean over the stages, per variant and kind of pass."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row["case"].split(",")[0], row["variant"]), []).append(row["ratio"])
    return [
        {
            "benchmark": "stages",
            "case": f"{kind}, geometric mean of {len(ratios)} stages",
            "variant": variant,
            "reference": LIBRARY,
            "ratio": exp(sum(map(log, ratios)) / len(ratios)),
        }
        for (kind, variant), ratios in groups.items()
    ]


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "stages": stages,
    "small": small,
    "backward": backward,
}
