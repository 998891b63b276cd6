"""Cases from files to label maps on the disk: one after another, and with loading and writing beside the
network.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import results
from medconv.data.case import Case
from medconv.data.io.writing import write_label
from medconv.features.diagnosis.alternating import alternate
from medconv.inference.predict import output_in, predict, usable_device
from medconv.inference.predictor import Predictor

REFERENCE = "one after another"
_SHOWN = ["case", "variant", "seconds", "ratio", "spread", "seconds_per_case"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", type=Path, required=True, help="what to predict by")
    parser.add_argument("--input", type=Path, required=True, help="a folder of images")
    parser.add_argument("--cases", type=int, default=42, help="at most so many of them")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2], help="cases that are loaded at once"
    )
    parser.add_argument("--pairs", type=int, default=5, help="timings of each variant, alternating")
    parser.add_argument("--device", help="default: a GPU if there is one")


def run(options: argparse.Namespace) -> list[results.Row]:
    """Seconds for all cases; the network is loaded before."""
    predictor = Predictor.load([options.checkpoint], usable_device(options.device))
    cases = predictor.find_cases(options.input)[: options.cases]
    variants = {REFERENCE: partial(_serially, predictor, cases)}
    variants |= {f"streamed, {n} loading": partial(_streamed, predictor, cases, n) for n in options.workers}
    timed = alternate(variants, REFERENCE, options.pairs, warm_up=1)
    kind = {
        "benchmark": "prediction",
        "case": f"{options.input.name}, {len(cases)} cases",
        "reference": REFERENCE,
    }
    each = {name: {"seconds_per_case": row["seconds"] / len(cases)} for name, row in timed.items()}
    return [
        {**kind, **results.conditions(options.device), "variant": name, **row, **each[name]}
        for name, row in timed.items()
    ]


def show(rows: Sequence[results.Row]) -> str:
    return results.table(rows, _SHOWN)


@torch.inference_mode()
def _serially(predictor: Predictor, cases: Sequence[Case]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            label = predictor.answer(predictor.scores([predictor.read(case)])[0])
            write_label(Path(folder) / f"{case.id}.nii.gz", label, case.images[0])


def _streamed(predictor: Predictor, cases: Sequence[Case], workers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        predict(predictor, cases, output_in(Path(folder) / "predictions", predictor), workers=workers)
